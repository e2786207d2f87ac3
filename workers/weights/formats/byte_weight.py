"""Weights of one byte, int8 or fp8 (e4m3), with scales of the tensor, of rows, of groups or of blocks.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from protos.errors import BadCheckpoint, UnsupportedModel
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight
from workers.weights.formats.stored_tensors import StoredTensors
from workers.weights.group_rounding import fp8_values

_FP8 = torch.float8_e4m3fn

Check = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSettings:
    """`weight` is of the type `levels`. Its scale has one number ("tensor"), one a row ("channel"), one for every
    `block[1]` inputs of a row ("group"), or one for every `block[0]` rows and `block[1]` inputs ("block")."""

    levels: Literal["int8", "fp8"]
    strategy: Literal["tensor", "channel", "group", "block"]
    scale: str  # the tensor's suffix
    divisor: float = 1.0  # of the stored scale
    block: tuple[int, int] = (1, 1)
    zero: str | None = None  # of int8, a zero for each scale
    activations: ActivationRounding | None = None
    input_scale: str | None = None  # the tensor of static activations' scale
    input_zero: str | None = None
    layout: str | None = None  # the tensor that has the layout's number, 0 for rows


class ByteWeight:
    """The bytes of the file are the codes: int8 levels get 128 added, fp8 is looked up in a table."""

    def __init__(self, stored: StoredTensors, settings: ByteSettings) -> None:
        self.stored, self._settings = stored, settings
        total = stored.projection.total, stored.share.total_inputs
        cut = (1, stored.inputs) if stored.by_inputs else (0, stored.outputs)
        dtype, name = (torch.int8, "I8") if settings.levels == "int8" else (_FP8, "F8_E4M3")
        self._weight = stored.tensor("weight", total, dtype, frozenset({name}), dim=cut[0], part=cut[1])
        self._scale = self._scales(settings.scale)
        self._zero = None if settings.zero is None else self._scales(settings.zero, zeros=True)
        if settings.layout is not None and settings.layout in stored:
            self._scalar(settings.layout, zero=True, check=_check_layout)
        self._input_scale = self._scalar(settings.input_scale, check=_check_scale)
        self._input_zero = self._scalar(settings.input_zero, zero=True)

    def weights(self) -> Sequence[QuantisedWeight]:
        stored, settings = self.stored, self._settings
        num_inputs = len(stored.inputs)
        codes = self._weight.view(torch.uint8)
        is_int8 = settings.levels == "int8"
        if is_int8:
            codes ^= 128
        zero: int | torch.Tensor = 128 if is_int8 else 0
        if self._zero is not None:
            zero = self._of_rows(self._zero.view(torch.uint8) ^ 128)
        scale_OG = self._of_rows(self._scale)
        weight = QuantisedWeight(
            bits=8,
            codes_OW=codes,
            num_inputs=num_inputs,
            scale=GroupValues(value_OB=scale_OG / settings.divisor if settings.divisor != 1 else scale_OG),
            group_size=settings.block[1] if settings.strategy in ("group", "block") else stored.share.total_inputs,
            zero=zero,
            table=None if is_int8 else fp8_values(codes.device),
            activations=self._activations(),
        )
        return [weight.in_groups_from(stored.inputs.start)]

    def _scales(self, suffix: str, *, zeros: bool = False) -> torch.Tensor:
        """Allocates the stored scales of the share's outputs and all groups; for blocks, all scales."""
        stored, strategy = self.stored, self._settings.strategy
        rows, inputs = stored.projection.total, stored.share.total_inputs
        height, width = self._settings.block
        shape: tuple[int, ...] = (rows, -(-inputs // width)) if strategy == "group" else (rows, 1)
        part: range | None = stored.outputs
        if strategy == "tensor":
            shape, part = stored.shape_of_one(suffix), None
        elif strategy == "block":
            shape, part = (-(-rows // height), -(-inputs // width)), None
        elif strategy == "channel" and len(stored.shape(suffix) or shape) == 1:
            shape = (rows,)
        if zeros:
            return stored.tensor(suffix, shape, torch.int8, frozenset({"I8"}), part=part)
        return stored.floats(suffix, shape, part=part)

    def _of_rows(self, values: torch.Tensor) -> torch.Tensor:
        stored = self.stored
        if self._settings.strategy == "tensor":
            return values.reshape(1, 1).expand(len(stored.outputs), 1).contiguous()
        if self._settings.strategy == "block":
            rows = torch.arange(stored.outputs.start, stored.outputs.stop, device=values.device)
            return values[rows // self._settings.block[0]]
        return values.reshape(len(stored.outputs), -1)

    def _scalar(self, suffix: str | None, *, zero: bool = False, check: Check | None = None) -> torch.Tensor | None:
        if suffix is None:
            return None
        shape = self.stored.shape_of_one(suffix)
        if zero:
            return self.stored.tensor(suffix, shape, torch.int32, frozenset({"I8", "I32", "U8"}), check=check)
        return self.stored.floats(suffix, shape, check=check)

    def _activations(self) -> ActivationRounding | None:
        rounding = self._settings.activations
        if rounding is None or self._input_scale is None:
            return rounding
        zero = 0 if self._input_zero is None else int(self._input_zero.item())
        return replace(rounding, scale=float(self._input_scale.item()), zero=zero)


def _check_scale(where: str, scale: torch.Tensor) -> None:
    if not 0 < float(scale.item()) < float("inf"):
        raise BadCheckpoint(f"{where} is {scale.item()}: a scale must be above 0: download the file again")


def _check_layout(where: str, layout: torch.Tensor) -> None:
    if int(layout.item()) != 0:
        raise UnsupportedModel(f"{where} is {int(layout.item())}, which is not served: rows, 0, are")
