"""GGUF: a linear weight is rows of blocks. A share of the inputs is read from the block on in which it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workers.checkpoint.encoding import LayerContext, Matrix, Projection, WeightEncoding, WeightEncodings, WeightShare
from workers.checkpoint.encodings.floats import FLOAT_ENCODING
from workers.checkpoint.encodings.quantised import QuantisedEncoding, QuantisedMatrix
from workers.checkpoint.encodings.stored import StoredTensors
from workers.checkpoint.formats.gguf import GGUFFormat
from workers.checkpoint.gguf.blocks import FORMATS, QUANTISED, weight_of_blocks
from workers.checkpoint.quantised import QuantisedWeight
from workers.checkpoint.slots import Slot
from workers.checkpoint.source import WeightSource


def encodings(_: GGUFFormat, source: WeightSource) -> WeightEncodings:
    """By the type of each tensor: fused projections of different types stay side by side."""
    names = frozenset(source.names())
    kinds = {name: source.describe(name).dtype for name in names if name.endswith(".weight")}
    quantised = BlockEncoding(source)

    def encoding_of(name: str) -> WeightEncoding:
        return quantised if kinds.get(f"{name}.weight") in QUANTISED else FLOAT_ENCODING

    return encoding_of


class BlockEncoding(QuantisedEncoding):
    """Of every block format: each tensor's is found when a share is made."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(self._stored)
        self._source = source

    def table(self, context: LayerContext, share: WeightShare) -> BlockTable:
        [projection] = share.projections
        return BlockTable(self._stored(projection, share, context.device), context, share.padding)

    def _stored(self, projection: Projection, share: WeightShare, device: str) -> BlockWeight:
        kind = self._source.describe(f"{projection.name}.weight").dtype
        return BlockWeight(StoredTensors(projection, share, device, self._source), kind)


class BlockTable:
    """Rows of an embedding, kept as they are stored and converted when they are looked up."""

    def __init__(self, weight: BlockWeight, context: LayerContext, padding: int) -> None:
        self._weight = weight
        self._context, self._padding = context, padding

    def __call__(self, rows_T: torch.Tensor) -> torch.Tensor:
        found = weight_of_blocks(self._weight.kind, self._weight.blocks_OW[rows_T])
        return found.dequantised().to(self._context.dtype)

    def product(self) -> Matrix:
        return QuantisedMatrix([self._weight], self._context.kernels, self._context.dtype, padding=self._padding)

    def slots(self) -> Iterator[Slot]:
        return self._weight.slots()


class BlockWeight:
    """Outputs are cut exactly, inputs at the borders of blocks: the rest is cut off when the blocks are converted."""

    def __init__(self, stored: StoredTensors, kind: str) -> None:
        block, share = FORMATS[kind], stored.share
        self._stored, self.kind = stored, kind
        first, last = stored.inputs.start // block.num_values, -(-stored.inputs.stop // block.num_values)
        self._first_input = first * block.num_values
        self.blocks_OW = stored.tensor(
            "weight",
            (stored.projection.total, -(-share.total_inputs // block.num_values) * block.num_bytes),
            torch.uint8,
            frozenset({kind}),
            dim=1 if stored.by_inputs else 0,
            part=range(first * block.num_bytes, last * block.num_bytes) if stored.by_inputs else stored.outputs,
        )

    def slots(self) -> Iterator[Slot]:
        return iter(self._stored.slots)

    def weights(self) -> Sequence[QuantisedWeight]:
        weight = weight_of_blocks(self.kind, self.blocks_OW)
        skipped, wanted = self._stored.inputs.start - self._first_input, len(self._stored.inputs)
        return [weight if weight.num_inputs == wanted else weight.cut_inputs(skipped, wanted)]
