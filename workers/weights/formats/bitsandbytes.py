"""bitsandbytes. LLM.int8(): int8 levels, `SCB` has the largest magnitude of each row. NF4: two codes a byte, the first
in the high bits, over the weight flattened; `absmax` of every block of it, which is quantised too where there is a
`nested_absmax`.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from protos.errors import BadCheckpoint, UnsupportedModel
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.bit_stream import packed_bytes
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight
from workers.weights.encoding import WeightEncodings
from workers.weights.formats.byte_weight import ByteSettings, ByteWeight
from workers.weights.formats.quantised_matrix import encodings_where
from workers.weights.formats.stored_tensors import StoredTensors
from workers.weights.source import WeightSource

_U8 = frozenset({"U8"})
_F32 = frozenset({"F32"})
_STATE = "weight.quant_state.bitsandbytes__nf4"
_MAX_STATE = 4096  # bytes


def int8_encodings(outliers_from: float | None, source: WeightSource) -> WeightEncodings:
    settings = ByteSettings(
        levels="int8",
        strategy="channel",
        scale="SCB",
        divisor=127.0,
        layout="weight_format",
        activations=ActivationRounding(levels="int8", outliers_from=outliers_from),
    )
    return encodings_where("SCB", source, lambda _: settings, ByteWeight)


def nf4_encodings(_: None, source: WeightSource) -> WeightEncodings:
    return encodings_where(_STATE, source, lambda _: None, lambda stored, _: NF4Weight(stored))


class NF4Weight:
    """A share by inputs is cut out of all rows when it is converted: the flattened weight has its inputs scattered."""

    def __init__(self, stored: StoredTensors) -> None:
        self.stored = stored
        total_inputs, total_outputs = stored.share.total_inputs, stored.projection.total
        rows = range(total_outputs) if stored.by_inputs else stored.outputs
        self._num_rows = len(rows)
        num_blocks = (stored.shape("weight.absmax") or (total_outputs,))[0]
        self._per_row = num_blocks // total_outputs
        if not self._per_row or num_blocks % total_outputs or total_inputs % self._per_row or total_inputs % 2:
            raise UnsupportedModel(
                f"tensor '{stored.projection.name}.weight.absmax' has {num_blocks} blocks: rows must have whole blocks"
            )
        self._block = total_inputs // self._per_row
        width = packed_bytes(total_inputs, 4)
        self._packed = stored.tensor(
            "weight", (total_outputs * width, 1), torch.uint8, _U8, part=range(rows.start * width, rows.stop * width)
        )
        blocks = range(rows.start * self._per_row, rows.stop * self._per_row)
        self._first_block = blocks.start
        self._levels = stored.tensor("weight.quant_map", (16,), torch.float32, _F32)
        self._nested: tuple[torch.Tensor, torch.Tensor] | None = None
        if "weight.nested_absmax" in stored:
            self._absmax = stored.tensor("weight.absmax", (num_blocks,), torch.uint8, _U8, part=blocks)
            nested = stored.shape("weight.nested_absmax") or (1,)
            if len(nested) != 1 or nested[0] > num_blocks:
                nested = (-(-num_blocks // 256),)
            self._nested = (
                stored.tensor("weight.nested_quant_map", (256,), torch.float32, _F32),
                stored.tensor("weight.nested_absmax", nested, torch.float32, _F32),
            )
        else:
            self._absmax = stored.tensor("weight.absmax", (num_blocks,), torch.float32, _F32, part=blocks)
        length = min(_MAX_STATE, *(stored.shape(_STATE) or (1,)))
        self._state = stored.tensor(_STATE, (length,), torch.uint8, _U8, check=self._check_state)

    def weights(self) -> Sequence[QuantisedWeight]:
        codes = self._packed.view(self._num_rows, -1)
        num_inputs = self.stored.share.total_inputs
        weight = QuantisedWeight(
            bits=4,
            codes_OW=(codes << 4) | (codes >> 4),
            num_inputs=num_inputs,
            scale=GroupValues(value_OB=self._scales().view(self._num_rows, -1)),
            group_size=self._block,
            table=self._levels,
        )
        if self.stored.by_inputs:
            weight = weight.cut_inputs(self.stored.inputs.start, len(self.stored.inputs))
        return [weight]

    def _scales(self) -> torch.Tensor:
        if self._nested is None:
            return self._absmax
        levels, largest = self._nested
        state = json.loads(bytes(self._state.tolist()))
        blocks = torch.arange(self._first_block, self._first_block + len(self._absmax), device=levels.device)
        scales: torch.Tensor = levels[self._absmax.int()] * largest[blocks // state["nested_blocksize"]]
        return scales.add_(state["nested_offset"])

    def _check_state(self, where: str, state: torch.Tensor) -> None:
        try:
            state_fields = json.loads(bytes(state.tolist()))
            shape_fields = state_fields["quant_type"], state_fields["blocksize"], list(state_fields["shape"])
            nested = self._nested is None or (
                float(state_fields["nested_offset"]),
                int(state_fields["nested_blocksize"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BadCheckpoint(f"{where} is not the JSON that bitsandbytes writes ({error!r})") from None
        wanted = "nf4", self._block, [self.stored.projection.total, self.stored.share.total_inputs]
        if shape_fields != wanted:
            raise BadCheckpoint(f"{where} has (type, block, shape) {shape_fields}, its tensors make it {wanted}")
        if self._nested is not None:
            num_blocks = self.stored.projection.total * self._per_row
            size = nested[1] if isinstance(nested, tuple) else 0
            if size < 1 or -(-num_blocks // size) != len(self._nested[1]):
                raise BadCheckpoint(f"{where} has nested blocks of {size}, for {num_blocks} blocks")
