"""Keys and values of 8 bits in Triton: how they are rounded when they are written, and what the attention kernels make
of them.

    score  = scale of the key * (q . integers)          int8: a scale of each position; e4m3: one of the head
    result = sum of (weight * scale of the value) * integers

Cards of 8.0 have no e4m3, so it is bytes here, made and read by operations on bits. Legend: NB blocks of the cache,
K key/value heads, BS positions of a block, D head dim, H heads of a program, P pairs of a head's dimensions, C
positions of a tile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.device_kernels import KVScales
from workers.kernels.quantised.activations import nearest, nearest_fp8

PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LARGEST_FP8 = tl.constexpr(448.0)
_INT8_STEP = tl.constexpr(1 / 127)
_LEAST_SCALE = tl.constexpr(2.0**-126)  # `reference.LEAST_SCALE`

_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

_BFLOAT16_OF_INT8 = tl.constexpr("""{ .reg .b32 u, a, b, c, d; .reg .f32 e, f, g, h;
xor.b32 u, $2, 0x80808080;
prmt.b32 a, u, 0x4b000000, 0x7650; prmt.b32 b, u, 0x4b000000, 0x7651;
prmt.b32 c, u, 0x4b000000, 0x7652; prmt.b32 d, u, 0x4b000000, 0x7653;
mov.b32 e, a; mov.b32 f, b; mov.b32 g, c; mov.b32 h, d;
sub.f32 e, e, 0f4b000080; sub.f32 f, f, 0f4b000080; sub.f32 g, g, 0f4b000080; sub.f32 h, h, 0f4b000080;
mov.b32 a, e; mov.b32 b, f; mov.b32 c, g; mov.b32 d, h;
prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, c, d, 0x7632; }""")
"""Four at a time: a byte plus 128 below the exponent of 2**23 is a float32 of 2**23 + 128 + the integer, and an integer
of 8 bits is a bfloat16, the upper half of its float32. The conversion that Triton chooses is one of a quarter of the
rate, and took longer than memory (measured on an H200)."""

_BFLOAT16_OF_FP8 = tl.constexpr("""{ .reg .b32 a, b, s, t;
prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
and.b32 s, a, 0x80008000; shr.u32 a, a, 4; lop3.b32 a, a, 0x07f007f0, s, 0xea;
and.b32 t, b, 0x80008000; shr.u32 b, b, 4; lop3.b32 b, b, 0x07f007f0, t, 0xea;
mad.lo.u32 s, a, 8, 0x00800080; lop3.b32 a, s, 0x40004000, a, 0xea;
mad.lo.u32 t, b, 8, 0x00800080; lop3.b32 b, t, 0x40004000, b, 0xea;
mov.b32 s, 0x7b807b80; mov.b32 t, 0x80008000;
fma.rn.bf16x2 $0, a, s, t; fma.rn.bf16x2 $1, b, s, t; }""")
"""Four at a time: e4m3's bits are those of a bfloat16 that is 2**120 times smaller, also below the first normal. NaN,
which has all of them, alone carries into the exponent's first bit, and becomes infinite."""

_ROOM = tl.constexpr(64.0)
"""Weights times the scales of int8 values are made larger by it, and the result smaller: in float16 they would lose
their last bits below 2**-14."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBits:
    """A layer's keys and values as the kernels take them, with the scales of those of 8 bits."""

    keys: torch.Tensor  # [NB, K, BS, D]; e4m3 as uint8
    values: torch.Tensor
    key_scales: torch.Tensor  # int8: [NB, K, BS]; e4m3: [K]; float32. Plain: not read
    value_scales: torch.Tensor
    scales_stride: int  # from one block's scales to the next block's
    kind: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None) -> CachedBits:
        if scales is None:
            assert keys.dtype.is_floating_point, f"keys and values of type {keys.dtype} without scales"
            assert keys.dtype != torch.float8_e4m3fn, "keys and values in e4m3 without scales"
            return cls(keys=keys, values=values, key_scales=keys, value_scales=values, scales_stride=0, kind=0)
        integers = keys.dtype == torch.int8
        for name, scale in zip(("keys", "values"), scales, strict=True):
            shape = keys.shape[:3] if integers else keys.shape[1:2]
            assert scale.shape == shape, f"scales of {name} are {tuple(scale.shape)}, {keys.dtype} has {tuple(shape)}"
            assert scale.dtype == torch.float32, f"scales of {name} are {scale.dtype}"
            assert scale.stride()[1:] == (keys.shape[2], 1)[: scale.dim() - 1], f"{name}: strides {scale.stride()}"
            assert scale.stride(0) == scales[0].stride(0), f"scales of {name} are {scale.stride(0)} apart"
        if not integers:
            assert keys.dtype == torch.float8_e4m3fn, f"keys and values of type {keys.dtype} with scales"
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        return cls(
            keys=keys,
            values=values,
            key_scales=scales[0],
            value_scales=scales[1],
            scales_stride=scales[0].stride(0) if integers else 0,
            kind=1 if integers else 2,
        )


@triton.jit
def int8_scale(first_HP, second_HP):
    """[H]: the largest magnitude of each head / 127, from both halves of the head. It is not finite if a number is
    not."""
    first_HP, second_HP = first_HP.to(tl.float32), second_HP.to(tl.float32)
    largest_H = tl.max(tl.maximum(tl.abs(first_HP), tl.abs(second_HP)), axis=1)
    missing_H = tl.sum(((first_HP != first_HP) | (second_HP != second_HP)).to(tl.int32), axis=1)
    scale_H = tl.maximum(largest_H * _INT8_STEP, _LEAST_SCALE)
    return tl.where(missing_H > 0, float("nan"), scale_H)


@triton.jit
def to_int8(x_HP, scale_H):
    """`reference.to_int8` by a scale."""
    quotient_HP = tl.div_rn(x_HP.to(tl.float32), tl.broadcast_to(scale_H[:, None], x_HP.shape))
    quotient_HP = tl.where(quotient_HP != quotient_HP, 0.0, quotient_HP)
    return nearest(quotient_HP).to(tl.int8)


@triton.jit
def to_fp8(x_HP, scale_H):
    """`reference.to_fp8`, as bytes: the sign, and 8 times the exponent and mantissa of a float32 whose last 20 bits are
    zero; below 2**-6 multiples of 2**-9. NaN has all bits of both."""
    quotient_HP = tl.div_rn(x_HP.to(tl.float32), tl.broadcast_to(scale_H[:, None], x_HP.shape))
    quotient_HP = tl.minimum(tl.maximum(quotient_HP, -_LARGEST_FP8), _LARGEST_FP8)
    size_HP = tl.abs(nearest_fp8(quotient_HP))
    normal_HP = (size_HP.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    size_HP = tl.where(size_HP < 0.015625, (size_HP * 512.0).to(tl.int32), normal_HP)
    sign_HP = (quotient_HP.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(x_HP.to(tl.float32)) < float("inf"), size_HP | sign_HP, 0x7F).to(tl.uint8)


@triton.jit
def levels(stored_CD, KIND: tl.constexpr, TYPE: tl.constexpr):
    """The exact values of stored numbers before their scales. e4m3 bits are read as a float32 whose exponent is 120 too
    small, also below the first normal."""
    if KIND == PLAIN:
        return stored_CD
    if tl.bfloat16 == TYPE and _COMPILED:
        if KIND == INT8:
            return tl.inline_asm_elementwise(_BFLOAT16_OF_INT8, "=r,=r,r", [stored_CD], tl.bfloat16, True, 4)
        return tl.inline_asm_elementwise(_BFLOAT16_OF_FP8, "=r,=r,r", [stored_CD], tl.bfloat16, True, 4)
    if KIND == INT8:
        return stored_CD.to(TYPE)
    wide_CD = stored_CD.to(tl.int32)
    bits_CD = ((wide_CD & 0x80) << 24) | ((wide_CD & 0x7F) << 20)
    wide_CD = tl.where(wide_CD & 0x7F == 0x7F, 0x7FC00000, bits_CD)
    return (wide_CD.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(TYPE)


@triton.jit
def key_factor(scales_ptr, head, KIND: tl.constexpr):
    return tl.load(scales_ptr + head) if KIND == FP8 else 1.0


@triton.jit
def value_factor(scales_ptr, head, KIND: tl.constexpr):
    if KIND == FP8:
        return tl.load(scales_ptr + head)
    return 1.0 / _ROOM if KIND == INT8 else 1.0


@triton.jit
def weighted(weights_MC, scales_C):
    """Weights times the scales of int8 values."""
    return weights_MC * (scales_C * _ROOM)[None, :]
