"""GGUF: a linear weight is rows of blocks. A share of the inputs is read from the block on in which it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workers.quantization.quantised_weight import QuantisedWeight
from workers.weights.encoding import LayerContext, Matrix, WeightEncoding, WeightEncodings, WeightShare
from workers.weights.formats.float_matrix import FLOAT_ENCODING
from workers.weights.formats.gguf_blocks import FORMATS, QUANTISED, weight_of_blocks
from workers.weights.formats.quantised_matrix import QuantisedEncoding, QuantisedMatrix
from workers.weights.formats.stored_tensors import StoredTensors
from workers.weights.slots import Slot
from workers.weights.source import WeightSource


def encodings(_: None, source: WeightSource) -> WeightEncodings:
    """Chooses the encoding by each tensor's type: fused projections of different types stay apart."""
    names = frozenset(source.names())
    kinds = {name: source.describe(name).dtype for name in names if name.endswith(".weight")}
    quantised = BlockEncoding(source)

    def encoding_of(name: str) -> WeightEncoding:
        return quantised if kinds.get(f"{name}.weight") in QUANTISED else FLOAT_ENCODING

    return encoding_of


class BlockEncoding(QuantisedEncoding):
    """Every block format: the file lists the type of each tensor."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source, BlockWeight)
        self._source = source

    def table(self, context: LayerContext, share: WeightShare) -> BlockTable:
        [projection] = share.projections
        weight = BlockWeight(StoredTensors(projection, share, context.device, self._source))
        return BlockTable(weight, context, share.padding)


class BlockTable:
    """Rows of an embedding, kept as they are stored and converted when they are looked up."""

    def __init__(self, weight: BlockWeight, context: LayerContext, padding: int) -> None:
        self._weight = weight
        self._context, self._padding = context, padding

    def __call__(self, rows_T: torch.Tensor) -> torch.Tensor:
        weight = weight_of_blocks(self._weight.kind, self._weight.blocks_OW[rows_T])
        return weight.dequantised().to(self._context.dtype)

    def product(self) -> Matrix:
        return QuantisedMatrix([self._weight], self._context.kernels, self._context.dtype, padding=self._padding)

    def slots(self) -> Iterator[Slot]:
        return iter(self._weight.stored.slots)


class BlockWeight:
    """Outputs are cut exactly, inputs at the borders of blocks: the rest is cut off when the blocks are converted."""

    def __init__(self, stored: StoredTensors) -> None:
        described = stored.described("weight")
        assert described is not None, "tensors without a type are floats"
        self.stored, self.kind = stored, described.dtype
        block, share = FORMATS[self.kind], stored.share
        first, last = stored.inputs.start // block.num_values, -(-stored.inputs.stop // block.num_values)
        self._first_input = first * block.num_values
        self.blocks_OW = stored.tensor(
            "weight",
            (stored.projection.total, -(-share.total_inputs // block.num_values) * block.num_bytes),
            torch.uint8,
            frozenset({self.kind}),
            dim=1 if stored.by_inputs else 0,
            part=range(first * block.num_bytes, last * block.num_bytes) if stored.by_inputs else stored.outputs,
        )

    def weights(self) -> Sequence[QuantisedWeight]:
        weight = weight_of_blocks(self.kind, self.blocks_OW)
        skipped, wanted = self.stored.inputs.start - self._first_input, len(self.stored.inputs)
        return [weight if weight.num_inputs == wanted else weight.cut_inputs(skipped, wanted)]
