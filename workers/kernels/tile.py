"""The shared parts of both attention kernels: the size of a tile, the address of a page, a step of the softmax.

Legend: M query rows of a tile, C positions of a tile, D head dim, S rows, B blocks of a row, T tokens, N query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.kernels.quantised.cached_bits import INT8, PLAIN, CachedBits, levels, weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """`rows` of queries (tokens times the heads that share a key/value head) by `positions` of the context, the
    positions loaded `stages` - 1 tiles ahead by programs of `warps` warps. `max_registers` is per thread: with fewer
    registers, more programs run at once, until values spill; None leaves it to the compiler."""

    rows: int
    positions: int
    warps: int
    stages: int
    max_registers: int | None = None


@triton.jit
def softmax_step(scores_MC, scale_log2, max_M, sum_M, acc_MD):
    """FlashAttention's online softmax to the base 2: (weights of this tile, new maximum, new sum, rescaled result).

    A position that is not visible has a score of -inf. A row may have no visible position yet.
    """
    new_max_M = tl.maximum(max_M, tl.max(scores_MC, axis=1) * scale_log2)
    finite_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    weights_MC = tl.exp2(scores_MC * scale_log2 - finite_M[:, None])
    rescale_M = tl.exp2(max_M - finite_M)
    return weights_MC, new_max_M, sum_M * rescale_M + tl.sum(weights_MC, axis=1), acc_MD * rescale_M[:, None]


@triton.jit
def capped(scores_MC, cap_scale):
    """Hyperbolic tangents of the scores, which are then scaled by the cap alone. `cap_scale` is scale / cap."""
    return 1.0 - 2.0 / (tl.exp(2.0 * cap_scale * scores_MC) + 1.0)


@triton.jit
def first_state(sinks_ptr, heads_M, inside_M, M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """(maximum, sum) of a softmax before its first position: a sink is a logit without a value."""
    max_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        max_M = tl.load(sinks_ptr + heads_M, mask=inside_M, other=0.0) * 1.4426950408889634
        sum_M = tl.full([M], 1.0, tl.float32)
    return max_M, sum_M


@triton.jit
def accumulate(
    acc_MD, sum_M, max_M, q_MD, queries_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, head, start, stop,
    first, block_stride, scales_stride, scale_log2, cap_scale, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attention to positions [start, stop) of one row, in tiles from `start` on. Returns (result, sum, maximum).

    Not masked: every query sees all of them, and stop - start is a multiple of C. Masked: positions before `first` are
    not loaded, because their blocks may belong to other sequences. Causal: each query, at position `queries_M`, sees up
    to itself and its window.

    Block ids are fetched a tile ahead by hand: the compiler then sees no load that waits for another load, and keeps a
    tile of keys and values under way for every stage but one. The compiler alone kept one tile under way (read from the
    compiled code).
    """
    TYPE: tl.constexpr = q_MD.dtype
    inside_D = (tl.arange(0, D) < DIM)[None, :]
    positions_C = start + tl.arange(0, C)
    block_C = tl.load(table_ptr + positions_C // BLOCK_SIZE, mask=positions_C < stop, other=0)
    for tile in range(start, stop, C):
        positions_C = tile + tl.arange(0, C)
        next_C = positions_C + C
        next_block_C = tl.load(table_ptr + next_C // BLOCK_SIZE, mask=next_C < stop, other=0)
        inside_CD = inside_D
        if MASKED:
            loaded_C = (positions_C < stop) & (positions_C >= first)
            inside_CD = loaded_C[:, None] & inside_D
        in_block_C = (head * BLOCK_SIZE + positions_C % BLOCK_SIZE) * DIM
        offsets_CD = (block_C.to(tl.int64) * block_stride + in_block_C)[:, None] + tl.arange(0, D)[None, :]
        k_CD = levels(tl.load(k_ptr + offsets_CD, mask=inside_CD, other=0), KIND, TYPE)
        scores_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision=PRECISION)
        if KIND == INT8:
            scales_C = block_C.to(tl.int64) * scales_stride + head * BLOCK_SIZE + positions_C % BLOCK_SIZE
            there_C = loaded_C if MASKED else positions_C >= 0
            scores_MC *= tl.load(k_scales_ptr + scales_C, mask=there_C, other=0.0)[None, :]
        if CAPPED:
            scores_MC = capped(scores_MC, cap_scale)
        if MASKED:
            seen_MC = loaded_C[None, :]
            if CAUSAL:
                seen_MC = seen_MC & (positions_C[None, :] <= queries_M[:, None])
                if WINDOW:
                    seen_MC = seen_MC & (positions_C[None, :] > queries_M[:, None] - WINDOW)
            scores_MC = tl.where(seen_MC, scores_MC, float("-inf"))
        weights_MC, max_M, sum_M, acc_MD = softmax_step(scores_MC, scale_log2, max_M, sum_M, acc_MD)
        if KIND == INT8:
            weights_MC = weighted(weights_MC, tl.load(v_scales_ptr + scales_C, mask=there_C, other=0.0))
        v_CD = levels(tl.load(v_ptr + offsets_CD, mask=inside_CD, other=0), KIND, TYPE)
        acc_MD = tl.dot(weights_MC.to(TYPE), v_CD, acc=acc_MD, input_precision=PRECISION)
        block_C = next_block_C
    return acc_MD, sum_M, max_M


def check_paged(q_TND: torch.Tensor, cache: CachedBits, block_tables_SB: torch.Tensor) -> int:
    """Asserts the requirements of both attention kernels. Returns the number of queries that share a key/value head."""
    k_cache, v_cache = cache.keys, cache.values
    (_, num_heads, dim), (_, num_kv_heads, block_size, _) = q_TND.shape, k_cache.shape
    assert q_TND.stride()[1:] == (dim, 1), f"q has strides {q_TND.stride()}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} query heads on {num_kv_heads} key/value heads"
    for name, part in (("keys", k_cache), ("values", v_cache)):
        assert part.shape == (*v_cache.shape[:3], dim), f"cached {name} are {tuple(part.shape)}, heads of {dim}"
        assert part.stride()[1:] == (block_size * dim, dim, 1), f"cached {name} have strides {part.stride()}"
        assert part.stride(0) == k_cache.stride(0), f"blocks of {name} are {part.stride(0)} apart"
        assert cache.kind != PLAIN or part.dtype == q_TND.dtype, f"cached {name} are {part.dtype}, q is {q_TND.dtype}"
    assert block_tables_SB.dtype == torch.int32, f"block tables are {block_tables_SB.dtype}"
    assert block_tables_SB.stride(1) == 1, f"block tables have strides {block_tables_SB.stride()}"
    return num_heads // num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxOptions:
    """The arguments of both attention kernels for `workers.attention.backend`'s scale, soft cap and sinks."""

    scale_log2: float  # of the dot products, after `capped`
    cap_scale: float
    capped: bool

    @classmethod
    def of(cls, scale: float, softcap: float) -> SoftmaxOptions:
        assert scale > 0, f"scale is {scale}: the running maximum is taken before it is applied"
        assert softcap >= 0, f"soft cap is {softcap}"
        if softcap == 0:
            return cls(scale_log2=scale * math.log2(math.e), cap_scale=1.0, capped=False)
        return cls(scale_log2=softcap * math.log2(math.e), cap_scale=scale / softcap, capped=True)


def check_sinks(sinks_N: torch.Tensor | None, num_heads: int) -> None:
    if sinks_N is not None:
        assert sinks_N.shape == (num_heads,), f"sinks are {tuple(sinks_N.shape)} of {num_heads} heads"
        assert sinks_N.dtype == torch.float32, f"sinks are {sinks_N.dtype}"
        assert sinks_N.is_contiguous(), f"sinks have strides {sinks_N.stride()}"


def check_indices(**indices: torch.Tensor) -> None:
    """Asserts that the index tensors are contiguous arrays of the kernels' type."""
    for name, index in indices.items():
        assert index.dtype == torch.int32, f"{name} is {index.dtype}"
        assert index.is_contiguous(), f"{name} has strides {index.stride()}"
