"""Chooses the kernels of a quantised weight, and calls them. Legend: T tokens, I inputs, O outputs, G groups."""

from __future__ import annotations

import torch

from workers.kernels.device_kernels import QuantisedProduct
from workers.kernels.quantised.activations import RoundedInputs, round_inputs
from workers.kernels.quantised.grouped_codes import GroupedCodes, grouped_product
from workers.kernels.quantised.one_byte import STEP, ByteCodes, byte_product
from workers.kernels.quantised.packed_weights import packed_groups
from workers.kernels.this_device import capability, num_multiprocessors
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.quantised_weight import QuantisedWeight

_INT8_ZERO = 128  # that formats of signed bytes add to make codes


class GroupedProduct:
    """Inputs as they are, weights of 2 to 8 bits."""

    def __init__(self, codes: GroupedCodes) -> None:
        self.codes = codes

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return grouped_product(x_TI, self.codes, bias_O)


class ByteProduct:
    """Inputs that are rounded to 8 bits as the checkpoint says, weights of 8 bits."""

    def __init__(self, codes: ByteCodes, rounding: ActivationRounding) -> None:
        self.codes = codes
        self.rounding = rounding
        self._scale: torch.Tensor | None = None
        if rounding.scale is not None:
            self._scale = torch.tensor([rounding.scale], device=codes.levels_OI.device)
        self._fp8_type = torch.float16 if codes.levels_OI.dtype == torch.uint8 else torch.float8_e4m3fn

    def rounded(self, x_TI: torch.Tensor) -> RoundedInputs:
        return round_inputs(
            x_TI if x_TI.stride(1) == 1 else x_TI.contiguous(),
            levels=self.rounding.levels,
            group=self.rounding.group,
            scale=self._scale,
            zero=self.rounding.zero,
            fp8_type=self._fp8_type,
        )

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        return byte_product(self.rounded(x_TI), self.codes, bias_O, dtype=x_TI.dtype, zero=self.rounding.zero)


def quantised_product(weight: QuantisedWeight) -> QuantisedProduct | None:
    """Packs a copy of the weight. None for what no kernel takes: LLM.int8()'s outliers, int8 inputs with weights in
    groups or with zero points, fp8 inputs with scales that do not belong to whole groups of 128 inputs, and groups so
    short that most of what is read would be gaps."""
    device = weight.codes_OW.device
    if 0 in (weight.num_outputs, weight.num_columns) or device.type == "meta":
        return None
    if weight.activations is None:
        codes = packed_groups(weight, num_multiprocessors(device))
        return None if codes is None else GroupedProduct(codes)
    packed = packed_bytes(weight, num_multiprocessors(device), fp8_units=_has_fp8_units(device))
    return None if packed is None else ByteProduct(packed, weight.activations)


def packed_bytes(weight: QuantisedWeight, num_multiprocessors: int, *, fp8_units: bool) -> ByteCodes | None:
    """None for a weight that the kernel does not take."""
    rounding = weight.activations
    assert rounding is not None
    if (
        weight.bits != 8
        or weight.order_I is not None
        or weight.minimum is not None
        or rounding.outliers_from is not None
    ):
        return None
    levels_OI = _int8_levels(weight) if rounding.levels == "int8" else _fp8_levels(weight, fp8_units)
    if levels_OI is None:
        return None
    row_sums_O = levels_OI.sum(dim=1, dtype=torch.int32) if rounding.zero else None
    return ByteCodes(
        levels_OI=levels_OI,
        scale_GO=weight.scale.of_groups().T.contiguous(),
        row_sums_O=row_sums_O,
        num_multiprocessors=num_multiprocessors,
    )


def _int8_levels(weight: QuantisedWeight) -> torch.Tensor | None:
    assert weight.activations is not None
    if weight.scale.num_groups != 1 or weight.table is not None or weight.activations.group is not None:
        return None
    if not isinstance(weight.zero, int) or weight.zero != _INT8_ZERO:
        return None
    return (weight.codes_OW ^ _INT8_ZERO).view(torch.int8).contiguous()


def _fp8_levels(weight: QuantisedWeight, fp8_units: bool) -> torch.Tensor | None:
    assert weight.activations is not None
    e4m3 = torch.arange(256, dtype=torch.uint8, device=weight.codes_OW.device).view(torch.float8_e4m3fn).float()
    in_blocks = weight.scale.num_groups == 1 or (
        weight.group_starts is None and weight.group_size == STEP and weight.group_offset == 0
    )
    if weight.table is None or not torch.equal(weight.table.nan_to_num(), e4m3.nan_to_num()) or not in_blocks:
        return None
    if weight.activations.group not in (None, STEP):
        return None
    codes_OI = weight.codes_OW.contiguous()
    return codes_OI.view(torch.float8_e4m3fn) if fp8_units else codes_OI


def _has_fp8_units(device: torch.device) -> bool:
    return device.type == "cuda" and capability() >= 89
