"""Twins of this folder's kernels in plain torch, from the same packed weights: their twins.

Legend: T tokens, O outputs, I inputs, P positions of codes, U units, G groups.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from workers.kernels.quantised.activations import RoundedInputs
from workers.kernels.quantised.grouped_codes import FIELDS, GroupedCodes, GroupNumbers
from workers.kernels.quantised.one_byte import STEP, ByteCodes
from workers.quantization.activation_rounding import ActivationRounding


def grouped_weight(weight: GroupedCodes) -> torch.Tensor:
    """[O, P], float32."""
    codes = _codes(weight)
    level_OP = weight.table[codes.long()] if weight.table is not None else codes.float()
    units = weight.num_steps * FIELDS // weight.fields_per_unit
    size = weight.fields_per_unit * weight.field
    scale_OU = _of_units(weight.scale, units)
    offset_OU = torch.zeros_like(scale_OU)
    if isinstance(weight.zero, torch.Tensor):
        offset_OU += scale_OU * weight.zero.T.float()[:, torch.arange(units) // weight.units_per_zero]
    elif weight.table is None:
        offset_OU += scale_OU * weight.zero
    if weight.minimum is not None:
        offset_OU += _of_units(weight.minimum, units)
    weight_OP = level_OP * scale_OU.repeat_interleave(size, dim=1) - offset_OU.repeat_interleave(size, dim=1)
    return weight_OP[: weight.num_outputs]


def grouped_product(x_TI: torch.Tensor, weight: GroupedCodes, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T (+ b) in float32, rounded to x's type."""
    x_TP = F.pad(x_TI.float(), (0, max(1, weight.num_positions - weight.num_inputs)))
    x_TP = x_TP[:, : weight.num_positions] if weight.inputs_P is None else x_TP[:, weight.inputs_P]
    return F.linear(x_TP, grouped_weight(weight), None if bias_O is None else bias_O.float()).to(x_TI.dtype)


def round_inputs(
    x_TI: torch.Tensor,
    *,
    levels: Literal["int8", "fp8"],
    group: int | None = None,
    scale: torch.Tensor | None = None,
    zero: int = 0,
    fp8_type: torch.dtype = torch.float8_e4m3fn,
) -> RoundedInputs:
    """`ActivationRounding.rounded`, with a scale for each group, and levels with the zero added."""
    given = None if scale is None else float(scale)
    level_TI, scale_TI = ActivationRounding(levels=levels, group=group, scale=given, zero=zero).rounded(x_TI)
    level_TI = (level_TI + zero).to(torch.int8 if levels == "int8" else fp8_type)
    return RoundedInputs(levels_TI=level_TI, scale_TG=scale_TI[:, :: group or x_TI.shape[1]].contiguous())


def byte_product(
    x: RoundedInputs,
    weight: ByteCodes,
    bias_O: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    zero: int = 0,
) -> torch.Tensor:
    """The levels' products by groups of 128 inputs, in float64, times the scales of both. Rounded to `dtype`."""
    levels_OI = weight.levels_OI
    if levels_OI.dtype == torch.uint8:
        levels_OI = levels_OI.view(torch.float8_e4m3fn)
    level_TI = x.levels_TI.double() - zero
    y_TO = level_TI.new_zeros(len(level_TI), len(levels_OI))
    pairs = zip(torch.split(level_TI, STEP, dim=1), torch.split(levels_OI.double(), STEP, dim=1), strict=True)
    for group, (x_TX, w_OX) in enumerate(pairs):
        scale_O = weight.scale_GO[group if len(weight.scale_GO) > 1 else 0].double()
        scale_T = x.scale_TG[:, group if x.scale_TG.shape[1] > 1 else 0].double()
        y_TO += F.linear(x_TX, w_OX) * scale_O * scale_T[:, None]
    return (y_TO if bias_O is None else y_TO + bias_O.double()).to(dtype)


def _codes(weight: GroupedCodes) -> torch.Tensor:
    if weight.low_bits == 8:
        codes = (weight.low.view(torch.uint8) ^ 128).permute(0, 3, 1, 2, 4)
        return codes.reshape(weight.padded_outputs, weight.num_positions)
    fields = []
    for field in range(FIELDS):
        code = (weight.low.int() >> (field * weight.low_bits)) & (2**weight.low_bits - 1)
        if weight.high is not None:
            high = (weight.high.int() >> (field * weight.high_bits)) & (2**weight.high_bits - 1)
            code |= high << weight.low_bits
        fields.append(code)
    codes = torch.stack(fields, dim=3).permute(0, 2, 1, 3, 4)
    return codes.reshape(weight.padded_outputs, weight.num_positions).to(torch.uint8)


def _of_units(numbers: GroupNumbers, units: int) -> torch.Tensor:
    places_U = torch.arange(units, device=numbers.values_VO.device)
    value_UO = numbers.values_VO.float()[places_U // numbers.units_per_value]
    if numbers.factors_GO is not None:
        value_UO = value_UO * numbers.factors_GO.float()[places_U // numbers.units_per_factor]
    return value_UO.T
