"""Float weights that are rounded one tensor at a time as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from workers.quantization.quantised_weight import QuantisedWeight
from workers.weights.encoding import WeightEncoding, WeightEncodings
from workers.weights.formats.quantised_matrix import QuantisedEncoding
from workers.weights.formats.stored_tensors import StoredTensors
from workers.weights.group_rounding import GroupRounding, check_finite, fp8_rows
from workers.weights.slots import Slot
from workers.weights.source import WeightSource
from workers.weights.weight_formats import EMBEDDING, GROUP, HEAD, Levels, RoundedLayers


def encodings(layers: RoundedLayers, source: WeightSource) -> WeightEncodings:
    @cache
    def rounded_to(levels: Levels) -> WeightEncoding:
        return QuantisedEncoding(source, lambda stored: RoundedWeight(stored, levels))

    return lambda name: rounded_to(layers.of_layer(name))


class RoundedWeight:
    """Reads whole the groups in which a range of inputs lies, so that each rank rounds as a single one would."""

    def __init__(self, stored: StoredTensors, levels: Levels) -> None:
        self.stored, self._levels = stored, levels
        self._weight: QuantisedWeight | None = None
        tied = stored.projection.name == HEAD and "weight" not in stored
        self._name = f"{EMBEDDING if tied else stored.projection.name}.weight"
        total = stored.share.total_inputs
        width = total if levels == "fp8" else GROUP
        self._inputs = range(stored.inputs.start // width * width, min(-(-stored.inputs.stop // width) * width, total))
        stored.slots.append(
            Slot(
                name=self._name,
                shape=(stored.projection.total, total),
                target=torch.empty(len(stored.outputs), len(self._inputs), device="meta"),
                dim=1 if stored.by_inputs else 0,
                start=self._inputs.start if stored.by_inputs else stored.outputs.start,
                consume=self._round,
            )
        )

    def weights(self) -> Sequence[QuantisedWeight]:
        assert self._weight is not None, "weights are packed before they are read"
        return [self._weight]

    def _round(self, weight_OI: torch.Tensor) -> None:
        weight_OI = weight_OI.to(self.stored.device)
        dtype = weight_OI.dtype if weight_OI.dtype in (torch.bfloat16, torch.float16) else torch.float32
        if self._levels == "fp8":
            whole = fp8_rows(weight_OI, dtype)
        else:
            whole = GroupRounding(bits=4 if self._levels == "int4" else 8, group_size=GROUP).quantised(weight_OI, dtype)
        check_finite(self._name, whole.scale.value_OB)
        wanted = self.stored.inputs
        if len(self._inputs) > len(wanted):
            whole = whole.cut_inputs(wanted.start - self._inputs.start, len(wanted))
        self._weight = whole
