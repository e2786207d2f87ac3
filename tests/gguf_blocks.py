"""Blocks of every GGUF type: an own quantiser and decoder in numpy, written from the layouts in ggml-common.h, and
random valid blocks. Nothing here is shared with the product."""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
"""Values and bytes of a block."""
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip
"""Where its float16 numbers are."""
_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def random_blocks(kind: str, rows: int, values: int, seed: int = 0) -> Bytes:
    """[rows, bytes of a row]: every bit is random but those of scales, which are finite."""
    per, size = SIZES[kind]
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (rows, values // per, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = (chance.standard_normal((rows, values // per)) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = chance.integers(122, 125, blocks.shape[:-1], dtype=np.uint8)
    return blocks.reshape(rows, -1)


def decoded(kind: str, stored: Bytes) -> Floats:
    """[rows, values], one block after the other, one value after the other."""
    blocks = stored.reshape(-1, SIZES[kind][1])
    values = np.stack([_decode_block(kind, block) for block in blocks])
    return values.reshape(stored.shape[0], -1).astype(np.float32)


def _decode_block(kind: str, block: Bytes) -> Floats:
    per = SIZES[kind][0]
    halves = [np.float32(block[at : at + 2].view(np.float16)[0]) for at in _HALVES[kind]]
    return np.array([_value(kind, block, halves, i) for i in range(per)], dtype=np.float32)


def _value(kind: str, b: Bytes, halves: list[np.float32], i: int) -> np.float32:
    if kind == "MXFP4":  # a sign, two bits of exponent with 1 added, one of mantissa
        code = _nibble(b, 1, i)
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return np.float32((-size if code & 8 else size) * 2.0 ** (int(b[0]) - 127))
    d = halves[0]
    match kind:
        case "Q4_0":
            return d * np.float32(_nibble(b, 2, i) - 8)
        case "Q4_1":
            return d * np.float32(_nibble(b, 4, i)) + halves[1]
        case "Q5_0":
            return d * np.float32((_nibble(b, 6, i) | _bit(b, 2, i) << 4) - 16)
        case "Q5_1":
            return d * np.float32(_nibble(b, 8, i) | _bit(b, 4, i) << 4) + halves[1]
        case "Q8_0":
            return d * np.float32(b[2 + i].view(np.int8))
        case "IQ4_NL":
            return d * _TABLE[_nibble(b, 2, i)]
        case "Q2_K":
            both = int(b[i // 16])
            code = int(b[16 + i // 128 * 32 + i % 32]) >> (i % 128 // 32 * 2) & 3
            return d * np.float32(both & 15) * np.float32(code) - halves[1] * np.float32(both >> 4)
        case "Q3_K":
            group = i // 16
            low = int(b[96 + group % 8]) >> (group // 8 * 4) & 15
            high = int(b[104 + group % 4]) >> (group // 4 * 2) & 3
            code = int(b[32 + i // 128 * 32 + i % 32]) >> (i % 128 // 32 * 2) & 3
            third = int(b[i % 32]) >> (i // 32) & 1
            return d * np.float32((low | high << 4) - 32) * np.float32(code - (0 if third else 4))
        case "Q4_K" | "Q5_K":
            scale, least = _pair(b, i // 32)
            at = (16 if kind == "Q4_K" else 48) + i // 64 * 32 + i % 32
            code = int(b[at]) >> (i % 64 // 32 * 4) & 15
            if kind == "Q5_K":
                code |= (int(b[16 + i % 32]) >> (i // 32) & 1) << 4
            return d * np.float32(scale) * np.float32(code) - halves[1] * np.float32(least)
        case "Q6_K":
            half, rest = divmod(i, 128)
            low = int(b[half * 64 + rest % 64]) >> (rest // 64 * 4) & 15
            high = int(b[128 + half * 32 + rest % 32]) >> (rest // 32 * 2) & 3
            return d * np.float32(b[192 + i // 16].view(np.int8)) * np.float32((low | high << 4) - 32)
        case "IQ4_XS":
            group = i // 32
            low = int(b[4 + group // 2]) >> (group % 2 * 4) & 15
            high = int(b[2:4].view(np.uint16)[0]) >> (group * 2) & 3
            code = _nibble(b, 8 + group * 16, i % 32)
            return d * np.float32((low | high << 4) - 32) * _TABLE[code]
    raise AssertionError(kind)


def _nibble(b: Bytes, at: int, i: int) -> int:
    return int(b[at + i % 16]) >> (4 if i >= 16 else 0) & 15


def _bit(b: Bytes, at: int, i: int) -> int:
    return int(b[at + i // 8]) >> (i % 8) & 1


def _pair(b: Bytes, group: int) -> tuple[int, int]:
    """Scale and minimum of 6 bits."""
    if group < 4:
        return int(b[4 + group]) & 63, int(b[8 + group]) & 63
    low, j = int(b[8 + group]), group - 4
    return (low & 15) | int(b[4 + j]) >> 6 << 4, low >> 4 | int(b[8 + j]) >> 6 << 4


def encoded(kind: str, weight: Floats) -> Bytes:
    """Rounds a weight [rows, values] to nearest."""
    if kind in ("F32", "F16", "BF16"):
        return _as_floats(kind, weight)
    per = SIZES[kind][0]
    groups = weight.reshape(weight.shape[0], -1, per).astype(np.float32)
    return _ENCODERS[kind](groups).reshape(weight.shape[0], -1)


def _as_floats(kind: str, weight: Floats) -> Bytes:
    if kind == "BF16":
        bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
        even = (bits >> 16) & 1
        return ((bits + 0x7FFF + even) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(weight, dtype={"F32": np.float32, "F16": np.float16}[kind]).view(np.uint8)


def _q8_0(x: Floats) -> Bytes:
    d = _half(np.abs(x).max(axis=-1, keepdims=True) / 127)
    codes = np.rint(_over(x, d)).clip(-127, 127).astype(np.int8)
    return np.concatenate((_stored(d), codes.view(np.uint8)), axis=-1)


def _q4_0(x: Floats) -> Bytes:
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    d = _half(extreme / -8)
    codes = (np.rint(_over(x, d)) + 8).clip(0, 15).astype(np.uint8)
    return np.concatenate((_stored(d), codes[..., :16] | codes[..., 16:] << 4), axis=-1)


def _q4_k(x: Floats) -> Bytes:
    """Sub-blocks of 32 with scale and minimum, both rounded to 6 bits of the super-block's."""
    parts = x.reshape(*x.shape[:-1], 8, 32)
    least = np.minimum(parts.min(axis=-1), 0)
    step = (parts.max(axis=-1) - least) / 15
    d, dmin = (_half(one.max(axis=-1, keepdims=True) / 63) for one in (step, -least))
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


def _mxfp4(x: Floats) -> Bytes:
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-30)
    exponent = np.floor(np.log2(largest)) - 2
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    codes = np.abs(np.abs(x / 2**exponent)[..., None] - sizes).argmin(axis=-1).astype(np.uint8) | (x < 0) * np.uint8(8)
    return np.concatenate(((exponent + 127).astype(np.uint8), codes[..., :16] | codes[..., 16:] << 4), axis=-1)


_ENCODERS = {"MXFP4": _mxfp4, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


def _half(x: np.ndarray[Any, Any]) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _stored(halves: Floats) -> Bytes:
    return halves.astype(np.float16).view(np.uint8)


def _over(x: Floats, d: Floats) -> Floats:
    return np.divide(x, d, out=np.zeros(np.broadcast_shapes(x.shape, d.shape), dtype=np.float32), where=d != 0)
