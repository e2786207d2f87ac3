"""Attention of whole chunks over their pages, in Triton: FlashAttention's online softmax (Dao, 2023), causal.

    positions of a row    [ cached prefix | this chunk ]
    a tile of queries                      [  q  ]
    what it sees          [A|     B       |  C   ]     A the window's edge, B all of it, C up to the diagonal

Keys and values, cached or of this chunk, are read from their pages. Only A and C pay for masks. A tile's rows are
tokens times the G heads that share a key/value head: short chunks fill a tile, and a tile's diagonal is short.
Legend: S rows of the batch, T tokens, N query heads, K key/value heads, G = N / K, D head dim, M rows of a tile,
C positions of a tile, W tiles of queries (work items), B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from workers.kernels import this_device
from workers.kernels.device_kernels import KVScales
from workers.kernels.quantised.cached_bits import FP8, CachedBits, key_factor, value_factor
from workers.kernels.this_device import takes_large_tiles
from workers.kernels.tile import (
    SoftmaxOptions,
    Tile,
    accumulate,
    check_indices,
    check_paged,
    check_sinks,
    first_state,
)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, work_ptr, tables_ptr, sinks_ptr,
    q_stride, out_stride, block_stride, scales_stride, table_stride, scale_log2, cap_scale,
    G: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, M: tl.constexpr, C: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    item_ptr, head = work_ptr + tl.program_id(0) * 4, tl.program_id(1)
    row, start = tl.load(item_ptr), tl.load(item_ptr + 1)
    count, position = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    stop = position + count
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0

    lanes_M, dims_D = tl.arange(0, M), tl.arange(0, D)
    tokens_M, heads_M = lanes_M // G, head * G + lanes_M % G
    inside_MD = (tokens_M < count)[:, None] & (dims_D < DIM)[None, :]
    token_M = (start + tokens_M).to(tl.int64)
    q_offsets_MD = (token_M * q_stride + heads_M * DIM)[:, None] + dims_D[None, :]
    q_MD = tl.load(q_ptr + q_offsets_MD, mask=inside_MD, other=0.0)
    queries_M = position + tokens_M
    max_M, sum_M = first_state(sinks_ptr, heads_M, tokens_M < count, M, HAS_SINKS)
    if KIND == FP8:
        factor = key_factor(k_scales_ptr, head, KIND)
        scale_log2, cap_scale = scale_log2 * (1.0 if CAPPED else factor), cap_scale * factor
    acc_MD = tl.zeros([M, D], tl.float32)

    # B lies between the last query's first position and the first query's last, in whole tiles; tiles begin with pages.
    base = first // BLOCK_SIZE * BLOCK_SIZE
    full = base + tl.cdiv(tl.maximum(stop - WINDOW - base, 0), C) * C if WINDOW else base
    full = tl.minimum(full, stop)
    diagonal = full + tl.maximum(position + 1 - full, 0) // C * C
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    if WINDOW:
        acc_MD, sum_M, max_M = accumulate(
            acc_MD, sum_M, max_M, q_MD, queries_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, head,
            base, full, first, block_stride, scales_stride, scale_log2, cap_scale, DIM, BLOCK_SIZE, WINDOW, PRECISION,
            KIND, C, D, MASKED=True, CAUSAL=True, CAPPED=CAPPED,
        )  # fmt: skip
    acc_MD, sum_M, max_M = accumulate(
        acc_MD, sum_M, max_M, q_MD, queries_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, head,
        full, diagonal, first, block_stride, scales_stride, scale_log2, cap_scale, DIM, BLOCK_SIZE, WINDOW, PRECISION,
        KIND, C, D, MASKED=False, CAUSAL=False, CAPPED=CAPPED,
    )  # fmt: skip
    acc_MD, sum_M, max_M = accumulate(
        acc_MD, sum_M, max_M, q_MD, queries_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, head,
        diagonal, stop, first, block_stride, scales_stride, scale_log2, cap_scale, DIM, BLOCK_SIZE, WINDOW, PRECISION,
        KIND, C, D, MASKED=True, CAUSAL=True, CAPPED=CAPPED,
    )  # fmt: skip
    out_MD = acc_MD * value_factor(v_scales_ptr, head, KIND) / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    out_offsets_MD = (token_M * out_stride + heads_M * DIM)[:, None] + dims_D[None, :]
    tl.store(out_ptr + out_offsets_MD, out_MD.to(out_ptr.dtype.element_ty), mask=inside_MD)


def prefill_tile(dim: int, group: int, dtype: torch.dtype, max_query: int, *, rounded: bool = False) -> Tile:
    """128 rows on 8 warps are two of Hopper's warpgroups with 64 rows each, the least a wgmma takes, and let each key
    and value that comes from L2 do 128 multiplications; 64 positions keep scores and accumulator of heads of 128 in
    registers (186 a thread, compiled for 9.0); three stages (128 KiB) load two tiles ahead. Chunks of up to 64 rows
    take half a tile; float32 and longer heads take what fits the 99 KiB of 8.6 and 8.9. Keys and values of 8 bits
    (`rounded`) pass through registers: 64 positions of them spill on 8.x, and 32 on 12.x. Of the tiles that
    `benchmarks/gpu/kernels.py --sweep` tries this one was the fastest on an H200, at 8k and at 16 times 512.
    """
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(rows=max(32, smallest), positions=32, warps=4, stages=2)
    if triton.next_power_of_2(dim) > 128:
        return Tile(rows=max(64, smallest), positions=32, warps=4, stages=2)
    rows = max(smallest, 64 if max_query * group <= 64 else 128)
    positions = 64 if not rounded or takes_large_tiles() else 32 if this_device.capability() < 120 else 16
    return Tile(rows=rows, positions=positions, warps=rows // 16, stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """`work_W4`: (row, first token, number of tokens, position of the first) of each tile of queries, int32."""

    work_W4: torch.Tensor
    tile: Tile


def plan_prefill(
    rows: Sequence[int], query_starts: Sequence[int], context_lens: Sequence[int], *, group: int, tile: Tile
) -> NDArray[np.int32]:
    """The array of a `PrefillPlan`. Tiles with the most positions come first, so that the last ones, when
    multiprocessors run out of work, are short."""
    tokens = tile.rows // group
    work = []
    for row in rows:
        start, stop = query_starts[row], query_starts[row + 1]
        shift = context_lens[row] - stop
        work += [(row, token, min(tokens, stop - token), token + shift) for token in range(start, stop, tokens)]
    work.sort(key=lambda item: item[3], reverse=True)
    return np.array(work, dtype=np.int32).reshape(-1, 4)


def prefill(
    q_TND: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_TND: torch.Tensor,
    block_tables_SB: torch.Tensor,
    *,
    plan: PrefillPlan,
    scale: float,
    window: int | None,
    scales: KVScales | None = None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> None:
    """Writes the attention of the plan's tokens into `out_TND`; its other tokens stay unchanged. Caches [NB, K, BS, D],
    of q's type or, with `scales`, of 8 bits; block tables int32."""
    cache = CachedBits.of(k_cache, v_cache, scales)
    group = check_paged(q_TND, cache, block_tables_SB)
    assert out_TND.stride()[1:] == q_TND.stride()[1:], f"out has strides {out_TND.stride()}"
    check_indices(work=plan.work_W4)
    assert window is None or window > 0, f"window is {window}"
    check_sinks(sinks_N, q_TND.shape[1])
    options = SoftmaxOptions.of(scale, softcap)
    dim, tile = q_TND.shape[2], plan.tile
    if len(plan.work_W4) == 0:
        return
    _prefill[(len(plan.work_W4), k_cache.shape[1])](
        q_TND,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        out_TND,
        plan.work_W4,
        block_tables_SB,
        sinks_N,
        q_TND.stride(0),
        out_TND.stride(0),
        k_cache.stride(0),
        cache.scales_stride,
        block_tables_SB.stride(0),
        options.scale_log2,
        options.cap_scale,
        G=group,
        DIM=dim,
        BLOCK_SIZE=k_cache.shape[2],
        WINDOW=window or 0,
        PRECISION="tf32x3" if q_TND.dtype == torch.float32 else "tf32",
        KIND=cache.kind,
        M=tile.rows,
        C=tile.positions,
        D=max(16, triton.next_power_of_2(dim)),
        CAPPED=options.capped,
        HAS_SINKS=sinks_N is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.max_registers,
    )
