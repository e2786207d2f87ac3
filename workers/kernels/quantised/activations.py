"""Inputs rounded to 8 bits in Triton, with a scale of each token or of each group of a token's inputs, or a given one.

Legend: T tokens, I inputs, G groups of a token, R groups of a program, X inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_ELEMENTS = 4096  # of a program: 32 a thread. Chosen by reasoning, not measured yet.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedInputs:
    """x is `levels_TI` times the scale of its group. A group with a number that is not finite has the scale NaN."""

    levels_TI: torch.Tensor  # int8; float8_e4m3fn, or float16 with the values of float8_e4m3fn
    scale_TG: torch.Tensor  # float32


@triton.jit
def nearest(x):
    """To the nearest integer, ties to even, of numbers below 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def nearest_fp8(x):
    """To the nearest e4m3 number, ties to even, in float32: three bits behind the first, multiples of 2**-9 below."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = bits.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, nearest(x * 512.0) * 0.001953125, normal)


@triton.jit
def _round(
    x_ptr, given_ptr, levels_ptr, scales_ptr, x_stride, num_inputs, num_groups, zero, LARGEST: tl.constexpr,
    GROUP: tl.constexpr, GIVEN: tl.constexpr, FP8: tl.constexpr, R: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    groups_R, lanes_X = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, X)
    inputs_RX = groups_R[:, None] * GROUP + lanes_X[None, :]
    inside_RX = (lanes_X < GROUP)[None, :] & (inputs_RX < num_inputs)
    x_RX = tl.load(x_ptr + token * x_stride + inputs_RX, mask=inside_RX, other=0.0).to(tl.float32)
    bits_R = tl.max(x_RX.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # infinity and NaN are above all numbers
    largest_R = bits_R.to(tl.float32, bitcast=True)
    if GIVEN:
        scale_R = tl.load(given_ptr + tl.zeros([R], tl.int32))
    else:
        scale_R = tl.div_rn(largest_R, LARGEST)
        scale_R = tl.where(scale_R > 0, scale_R, 1.0)
    scale_R = tl.where(largest_R < float("inf"), scale_R, float("nan"))
    tl.store(scales_ptr + token * num_groups + groups_R, scale_R, mask=groups_R < num_groups)
    level_RX = tl.div_rn(x_RX, tl.broadcast_to(scale_R[:, None], [R, X]))
    level_RX = tl.where(level_RX == level_RX, level_RX, 0.0)
    if FP8:
        level_RX = nearest_fp8(tl.minimum(tl.maximum(level_RX, -448.0), 448.0))
    else:
        level_RX = tl.minimum(tl.maximum(level_RX, -1024.0), 1024.0)
        level_RX = tl.minimum(tl.maximum(nearest(level_RX) + zero, -128.0 if GIVEN else -127.0), 127.0)
    tl.store(levels_ptr + token * num_inputs + inputs_RX, level_RX.to(levels_ptr.dtype.element_ty), mask=inside_RX)


def round_inputs(
    x_TI: torch.Tensor,
    *,
    levels: Literal["int8", "fp8"],
    group: int | None = None,
    scale: torch.Tensor | None = None,
    zero: int = 0,
    fp8_type: torch.dtype = torch.float8_e4m3fn,
) -> RoundedInputs:
    """`reference.round_inputs`, bit for bit. With a given scale, float32 [1], int8 levels have `zero` added."""
    assert x_TI.dim() == 2, f"x is {tuple(x_TI.shape)}"
    assert x_TI.stride(1) == 1, f"x has strides {x_TI.stride()}"
    assert scale is None or (scale.dtype == torch.float32 and scale.numel() == 1), "a given scale is one float32"
    assert scale is None or group is None, "a given scale is that of the tensor"
    assert zero == 0 or scale is not None, "only a given scale has a zero"
    (num_tokens, num_inputs), device = x_TI.shape, x_TI.device
    size = min(group or num_inputs, num_inputs)
    num_groups = triton.cdiv(num_inputs, size)
    out_TI = torch.empty(num_tokens, num_inputs, dtype=torch.int8 if levels == "int8" else fp8_type, device=device)
    scale_TG = torch.empty(num_tokens, num_groups, device=device)
    if num_tokens:
        padded = triton.next_power_of_2(size)
        at_once = min(max(1, _ELEMENTS // padded), triton.next_power_of_2(num_groups))
        _round[(num_tokens, triton.cdiv(num_groups, at_once))](
            x_TI,
            scale_TG if scale is None else scale,
            out_TI,
            scale_TG,
            x_TI.stride(0),
            num_inputs,
            num_groups,
            float(zero),
            LARGEST=_LARGEST[levels],
            GROUP=size,
            GIVEN=scale is not None,
            FP8=levels == "fp8",
            R=at_once,
            X=padded,
            num_warps=4 if at_once * padded <= _ELEMENTS else 8,
        )
    return RoundedInputs(levels_TI=out_TI, scale_TG=scale_TG)
