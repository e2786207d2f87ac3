"""Float weights that are rounded one tensor at a time as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from workers.checkpoint.encoding import Projection, WeightEncoding, WeightEncodings, WeightShare
from workers.checkpoint.encodings.quantised import QuantisedEncoding
from workers.checkpoint.formats.rounded import EMBEDDING, GROUP, HEAD, Levels, RoundedFormat
from workers.checkpoint.quantised import QuantisedWeight
from workers.checkpoint.rounding import GroupRounding, check_finite, fp8_rows
from workers.checkpoint.slots import Slot
from workers.checkpoint.source import WeightSource


def encodings(weight_format: RoundedFormat, source: WeightSource) -> WeightEncodings:
    names = source.names()

    @cache
    def rounded_to(levels: Levels) -> WeightEncoding:
        def stored(projection: Projection, share: WeightShare, device: str) -> RoundedWeight:
            tied = projection.name == HEAD and f"{HEAD}.weight" not in names
            name = EMBEDDING if tied else projection.name
            return RoundedWeight(f"{name}.weight", projection, share, levels, device)

        return QuantisedEncoding(stored)

    return lambda name: rounded_to(weight_format.of_layer(name))


class RoundedWeight:
    """The groups that a range of inputs lies in are read whole, so that each rank rounds as one alone would."""

    def __init__(self, name: str, projection: Projection, share: WeightShare, levels: Levels, device: str) -> None:
        self._levels, self._device = levels, device
        self._share = share
        self._weight: QuantisedWeight | None = None
        total, last = share.total_inputs, share.first_input + share.num_inputs
        by_inputs = share.num_inputs < total
        width = total if levels == "fp8" else GROUP
        self._inputs = range(share.first_input // width * width, min(-(-last // width) * width, total))
        self._slot = Slot(
            name=name,
            shape=(projection.total, total),
            target=torch.empty(projection.size, len(self._inputs), device="meta"),
            dim=1 if by_inputs else 0,
            start=self._inputs.start if by_inputs else projection.start,
            consume=self._round,
        )

    def slots(self) -> Iterator[Slot]:
        yield self._slot

    def weights(self) -> Sequence[QuantisedWeight]:
        assert self._weight is not None, "weights are packed before they are read"
        return [self._weight]

    def _round(self, weight_OI: torch.Tensor) -> None:
        weight_OI = weight_OI.to(self._device)
        dtype = weight_OI.dtype if weight_OI.dtype in (torch.bfloat16, torch.float16) else torch.float32
        if self._levels == "fp8":
            whole = fp8_rows(weight_OI, dtype)
        else:
            whole = GroupRounding(bits=4 if self._levels == "int4" else 8, group_size=GROUP).quantised(weight_OI, dtype)
        check_finite(self._slot.name, whole.scale.value_OB)
        if len(self._inputs) > self._share.num_inputs:
            whole = whole.cut_inputs(self._share.first_input - self._inputs.start, self._share.num_inputs)
        self._weight = whole
