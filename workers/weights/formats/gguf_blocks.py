"""The block formats of GGUF, each converted to `QuantisedWeight`. Layouts: ggml, src/ggml-common.h and ggml-quants.c.

Legend: O outputs, B blocks of a row, N bytes of a block, I inputs, S super-blocks' groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from protos.model_files.gguf.types import TENSOR_TYPES
from workers.quantization.bit_stream import pack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight
from workers.weights.formats.mxfp4 import mxfp4_weight

FORMATS = {kind.name: kind for kind in TENSOR_TYPES.values()}

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of IQ4_NL and IQ4_XS."""


def weight_of_blocks(kind: str, stored_OW: torch.Tensor) -> QuantisedWeight:
    """The weight in rows of whole blocks, uint8."""
    blocks_OBN = torch.unflatten(stored_OW, 1, (-1, FORMATS[kind].num_bytes))
    return _CONVERTERS[kind](blocks_OBN)


def _q2_k(blocks: torch.Tensor) -> QuantisedWeight:
    factors, places = blocks[..., :16], _halves(blocks[..., 80:])
    codes = _shifted(torch.unflatten(blocks[..., 16:80], -1, (2, 1, 32)), (0, 2, 4, 6)) & 3
    return _blocked(2, codes, 16, scale=(places[0], factors & 15), minimum=(places[1], factors >> 4))


def _q3_k(blocks: torch.Tensor) -> QuantisedWeight:
    low, high, stored = blocks[..., 32:96], blocks[..., :32], blocks[..., 96:108]
    codes = _shifted(torch.unflatten(low, -1, (2, 1, 32)), (0, 2, 4, 6)) & 3
    third = torch.unflatten(_shifted(high.unsqueeze(-2), range(8)), -2, (2, 4)) & 1
    four = _shifted(stored[..., :8].unsqueeze(-2), (0, 4)).flatten(-2) & 15
    two = _shifted(stored[..., 8:].unsqueeze(-2), (0, 2, 4, 6)).flatten(-2) & 3
    factors = (four | two << 4).to(torch.int8) - 32
    return _blocked(3, codes | third << 2, 16, zero=4, scale=(_halves(blocks[..., 108:])[0], factors))


def _q4_k(blocks: torch.Tensor) -> QuantisedWeight:
    scale, minimum = _six_bit_pairs(blocks)
    codes = _shifted(torch.unflatten(blocks[..., 16:], -1, (4, 1, 32)), (0, 4)) & 15
    return _blocked(4, codes, 32, scale=scale, minimum=minimum)


def _q5_k(blocks: torch.Tensor) -> QuantisedWeight:
    scale, minimum = _six_bit_pairs(blocks)
    codes = _shifted(torch.unflatten(blocks[..., 48:], -1, (4, 1, 32)), (0, 4)) & 15
    fifth = torch.unflatten(_shifted(blocks[..., 16:48].unsqueeze(-2), range(8)), -2, (4, 2)) & 1
    return _blocked(5, codes | fifth << 4, 32, scale=scale, minimum=minimum)


def _q6_k(blocks: torch.Tensor) -> QuantisedWeight:
    low = _shifted(torch.unflatten(blocks[..., :128], -1, (2, 1, 64)), (0, 4)) & 15
    high = _shifted(torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32)), (0, 2, 4, 6)) & 3
    codes = torch.unflatten(low.flatten(-2), -1, (4, 32)) | high << 4
    factors = blocks[..., 192:208].contiguous().view(torch.int8)
    return _blocked(6, codes, 16, zero=32, scale=(_halves(blocks[..., 208:])[0], factors))


def _iq4_xs(blocks: torch.Tensor) -> QuantisedWeight:
    two = _shifted(blocks[..., 2:4].unsqueeze(-1), (0, 2, 4, 6), dim=-1).flatten(-2) & 3
    four = _shifted(blocks[..., 4:8].unsqueeze(-1), (0, 4), dim=-1).flatten(-2) & 15
    codes = _nibbles(torch.unflatten(blocks[..., 8:], -1, (8, 16)))
    factors = (four | two << 4).to(torch.int8) - 32
    return _blocked(4, codes, 32, table=_NONLINEAR, scale=(_halves(blocks[..., :2])[0], factors))


_CONVERTERS: Mapping[str, Callable[[torch.Tensor], QuantisedWeight]] = {
    "Q4_0": lambda blocks: _plain(4, _nibbles(blocks[..., 2:]), blocks, zero=8),
    "Q4_1": lambda blocks: _plain(4, _nibbles(blocks[..., 4:]), blocks, minimum=True),
    "Q5_0": lambda blocks: _plain(5, _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), blocks, zero=16),
    "Q5_1": lambda blocks: _plain(5, _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), blocks, minimum=True),
    "Q8_0": lambda blocks: _plain(8, blocks[..., 2:] ^ 0x80, blocks, zero=128),  # from two's complement
    "IQ4_NL": lambda blocks: _plain(4, _nibbles(blocks[..., 2:]), blocks, table=_NONLINEAR),
    "MXFP4": lambda blocks: mxfp4_weight(pack_bits(_nibbles(blocks[..., 1:]).flatten(1), 4), blocks[..., 0]),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs,
}  # fmt: skip
QUANTISED = frozenset(_CONVERTERS)


def _plain(
    bits: int,
    codes: torch.Tensor,
    blocks: torch.Tensor,
    *,
    zero: int = 0,
    minimum: bool = False,
    table: Sequence[float] | None = None,
) -> QuantisedWeight:
    scale, *added = _halves(blocks[..., : 4 if minimum else 2])
    return _weight(
        bits, codes, 32, zero=zero, table=table,
        scale=GroupValues(value_OB=scale),
        minimum=GroupValues(value_OB=-added[0]) if added else None,
    )  # fmt: skip


_Pair = tuple[torch.Tensor, torch.Tensor]  # [O, B] of super-blocks, [O, B, S] of their groups


def _blocked(
    bits: int,
    codes: torch.Tensor,
    group_size: int,
    *,
    scale: _Pair,
    minimum: _Pair | None = None,
    zero: int = 0,
    table: Sequence[float] | None = None,
) -> QuantisedWeight:
    least = None if minimum is None else GroupValues(value_OB=minimum[0], factor_OG=minimum[1].flatten(1).contiguous())
    factors = GroupValues(value_OB=scale[0], factor_OG=scale[1].flatten(1).contiguous())
    return _weight(bits, codes, group_size, scale=factors, minimum=least, zero=zero, table=table)


def _weight(
    bits: int,
    codes: torch.Tensor,
    group_size: int,
    *,
    scale: GroupValues,
    minimum: GroupValues | None,
    zero: int,
    table: Sequence[float] | None,
) -> QuantisedWeight:
    codes_OI = codes.flatten(1)
    return QuantisedWeight(
        bits=bits,
        codes_OW=pack_bits(codes_OI, bits),
        num_inputs=codes_OI.shape[1],
        scale=scale,
        group_size=group_size,
        zero=zero,
        table=None if table is None else _table(tuple(table), codes.device),
        minimum=minimum,
    )


@cache
def _table(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Copied to the device once: an embedding is looked up in recorded CUDA graphs, too, which take no copy."""
    return torch.tensor(levels, dtype=torch.float32, device=device)


def _halves(stored: torch.Tensor) -> list[torch.Tensor]:
    """The float16 numbers in the last dimension, each [O, B]."""
    return [half.contiguous() for half in stored.contiguous().view(torch.float16).unbind(-1)]


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """16 bytes are 32 values: the low halves, then the high ones."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """4 bytes are the fifth bits of 32 values, in order."""
    return (_shifted(stored.unsqueeze(-1), range(8), dim=-1).flatten(-2) & 1) << 4


def _shifted(stored: torch.Tensor, shifts: Sequence[int], dim: int = -2) -> torch.Tensor:
    """`stored` >> each shift, along its dimension `dim`, which has length 1."""
    return torch.cat([stored >> shift for shift in shifts], dim=dim)


def _six_bit_pairs(blocks: torch.Tensor) -> tuple[_Pair, _Pair]:
    """Q4_K's and Q5_K's: two float16, then 8 scales and 8 minima of 6 bits in 12 bytes."""
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), dim=-1)
    scale, minimum = _halves(blocks[..., :4])
    return (scale, scales), (minimum, minima)
