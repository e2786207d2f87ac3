"""Blocks of every GGUF type: weights rounded by llama.cpp's package `gguf`, or by the layouts in ggml-common.h where it
cannot, and random valid blocks."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip
"""Where its float16 numbers are."""
SIZES = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in _HALVES}
"""Values and bytes of a block."""


def random_blocks(kind: str, rows: int, values: int, seed: int = 0) -> Bytes:
    """[rows, bytes of a row]: random bits, with finite scales."""
    per, size = SIZES[kind]
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (rows, values // per, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = (chance.standard_normal((rows, values // per)) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = chance.integers(122, 125, blocks.shape[:-1], dtype=np.uint8)
    return blocks.reshape(rows, -1)


def encoded(kind: str, weight: Floats) -> Bytes:
    """Rounds a weight [rows, values] to nearest."""
    if kind not in _ENCODERS:
        return gguf.quantize(np.ascontiguousarray(weight, np.float32), gguf.GGMLQuantizationType[kind]).view(np.uint8)
    per = SIZES[kind][0]
    groups = weight.reshape(weight.shape[0], -1, per).astype(np.float32)
    return _ENCODERS[kind](groups).reshape(weight.shape[0], -1)


def _q4_k(x: Floats) -> Bytes:
    """Sub-blocks of 32 with scale and minimum, both rounded to 6 bits of the super-block's."""
    parts = x.reshape(*x.shape[:-1], 8, 32)
    least = np.minimum(parts.min(axis=-1), 0)
    step = (parts.max(axis=-1) - least) / 15
    d, dmin = (_half(scale.max(axis=-1, keepdims=True) / 63) for scale in (step, -least))
    scales = np.rint(_over(step, d)).clip(0, 63)
    minima = np.rint(_over(-least, dmin)).clip(0, 63)
    size, offset = (d * scales)[..., None], (dmin * minima)[..., None]
    codes = np.rint(_over(parts + offset, size)).clip(0, 15).astype(np.uint8)
    pairs = codes.reshape(*x.shape[:-1], 4, 2, 32)
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*x.shape[:-1], 128)
    sc, m = scales.astype(np.uint8), minima.astype(np.uint8)
    packed = np.concatenate(
        (
            sc[..., :4] | sc[..., 4:] >> 4 << 6,
            m[..., :4] | m[..., 4:] >> 4 << 6,
            (sc[..., 4:] & 15) | (m[..., 4:] & 15) << 4,
        ),
        axis=-1,
    )
    return np.concatenate((_stored(d), _stored(dmin), packed, nibbles), axis=-1)


def _q6_k(x: Floats) -> Bytes:
    parts = x.reshape(*x.shape[:-1], 16, 16)
    step = np.abs(parts).max(axis=-1) / 31
    d = _half(step.max(axis=-1, keepdims=True) / 127)
    scales = np.rint(_over(step, d)).clip(-128, 127)
    codes = (np.rint(_over(parts, (d * scales)[..., None])) + 32).clip(0, 63).astype(np.uint8)
    quarters = codes.reshape(*x.shape[:-1], 2, 4, 32)
    low = np.concatenate(
        [(quarters[..., j, :] & 15) | (quarters[..., j + 2, :] & 15) << 4 for j in (0, 1)], axis=-1
    ).reshape(*x.shape[:-1], 128)
    twos = [quarters[..., j, :] >> 4 << (2 * j) for j in range(4)]
    high = (twos[0] | twos[1] | twos[2] | twos[3]).reshape(*x.shape[:-1], 64)
    return np.concatenate((low, high, scales.astype(np.int8).view(np.uint8), _stored(d)), axis=-1)


_ENCODERS = {"Q4_K": _q4_k, "Q6_K": _q6_k}


def _half(x: np.ndarray[Any, Any]) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _stored(halves: Floats) -> Bytes:
    return halves.astype(np.float16).view(np.uint8)


def _over(x: Floats, d: Floats) -> Floats:
    return np.divide(x, d, out=np.zeros(np.broadcast_shapes(x.shape, d.shape), dtype=np.float32), where=d != 0)
