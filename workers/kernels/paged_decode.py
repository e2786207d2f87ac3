"""Attention of one query token a row over its pages, in Triton: flash-decoding (Dao et al., 2023) over a work list.

    contexts          row 0 [ item 0 | item 1 | item 2 ]   row 1 [ item 3 ]      long rows have more items of one length
    first kernel      one program an item and key/value head: online softmax over its positions, for all G queries
    second kernel     one program a split row and query head: its items' results, weighed by their softmax sums

The G queries that share a key/value head are the rows of one matrix product, so each key and value is read once. A
batch of one long context and many short ones keeps the device as busy as one of equal contexts. The list's length
depends on the number of rows alone, so a CUDA graph captured for it serves every context. Legend: R decoding rows, S
rows, T tokens, N query heads, K key/value heads, G = N / K, D head dim, M query rows of a tile (G, padded), C positions
of a tile, W items, X items reduced at once, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

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

_MIN_ITEM = 256
"""The minimum number of positions in an item. Their keys and values (128 KiB for heads of 128 in bfloat16) are 60 times
the partial result of four queries that a split costs. Chosen by reasoning, not measured yet."""

_PROGRAMS = 4
"""The number of programs per multiprocessor for split contexts. Three run at once, and the last one has the bandwidth
to itself. Chosen by reasoning, not measured yet."""

_GRAIN = 64  # items are of whole tiles,
_ALIGNMENT = 16  # and begin where a page can begin
_REDUCED = 16
_WHOLE, _UNUSED = -1, -1


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, tables_ptr, sinks_ptr,
    q_stride, out_stride, block_stride, scales_stride, table_stride, scale_log2, cap_scale,
    G: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, M: tl.constexpr, C: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Computes one item for one key/value head. The result of a whole row is written to its token, that of a part to
    the work space, with its log2-sum-exp."""
    item_ptr, head = items_ptr + tl.program_id(0) * 6, tl.program_id(1)
    row, token = tl.load(item_ptr), tl.load(item_ptr + 1).to(tl.int64)
    first, start, stop = tl.load(item_ptr + 2), tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    slot = tl.load(item_ptr + 5).to(tl.int64)
    if row < 0:
        return
    groups_M, dims_D = tl.arange(0, M), tl.arange(0, D)
    heads_M = head * G + groups_M
    inside_MD = (groups_M < G)[:, None] & (dims_D < DIM)[None, :]
    q_MD = tl.load(q_ptr + token * q_stride + heads_M[:, None] * DIM + dims_D[None, :], mask=inside_MD, other=0.0)
    max_M, sum_M = first_state(sinks_ptr, heads_M, groups_M < G, M, HAS_SINKS)
    if slot >= 0:  # the reduction has the sink
        max_M, sum_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if KIND == FP8:
        factor = key_factor(k_scales_ptr, head, KIND)
        scale_log2, cap_scale = scale_log2 * (1.0 if CAPPED else factor), cap_scale * factor
    acc_MD = tl.zeros([M, D], tl.float32)
    acc_MD, sum_M, max_M = accumulate(
        acc_MD, sum_M, max_M, q_MD, groups_M, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
        tables_ptr + row.to(tl.int64) * table_stride, head, start, stop, first, block_stride, scales_stride, scale_log2,
        cap_scale, DIM, BLOCK_SIZE, WINDOW, PRECISION, KIND, C, D, MASKED=True, CAUSAL=False, CAPPED=CAPPED,
    )  # fmt: skip
    out_MD = acc_MD * value_factor(v_scales_ptr, head, KIND) / tl.where(sum_M > 0, sum_M, 1.0)[:, None]  # or zeros
    if slot < 0:
        written_MD = token * out_stride + heads_M[:, None] * DIM + dims_D[None, :]
        tl.store(out_ptr + written_MD, out_MD.to(out_ptr.dtype.element_ty), mask=inside_MD)
    else:
        partial_M = slot * tl.num_programs(1) * G + heads_M
        tl.store(partial_ptr + partial_M[:, None] * DIM + dims_D[None, :], out_MD, mask=inside_MD)
        tl.store(lse_ptr + partial_M, max_M + tl.log2(sum_M), mask=groups_M < G)


@triton.jit
def _reduce(
    partial_ptr, lse_ptr, out_ptr, parts_ptr, sinks_ptr, out_stride,
    DIM: tl.constexpr, X: tl.constexpr, D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Reduces one query head of one row. Parts are never empty, so every log2-sum-exp is finite."""
    part_ptr, head, num_heads = parts_ptr + tl.program_id(0) * 3, tl.program_id(1), tl.num_programs(1)
    token, slot = tl.load(part_ptr).to(tl.int64), tl.load(part_ptr + 1).to(tl.int64)
    count = tl.load(part_ptr + 2)
    if count == 0:
        return
    dims_D = tl.arange(0, D)
    one_head = tl.full([1], head, tl.int32)
    largest, total = first_state(sinks_ptr, one_head, one_head >= 0, 1, HAS_SINKS)
    acc_D = tl.zeros([D], tl.float32)
    for done in range(0, count, X):
        parts_X = done + tl.arange(0, X)
        from_X = (slot + parts_X) * num_heads + head
        lse_X = tl.load(lse_ptr + from_X, mask=parts_X < count, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse_X, axis=0))
        weights_X = tl.exp2(lse_X - new_largest)
        inside_XD = (parts_X < count)[:, None] & (dims_D < DIM)[None, :]
        partial_XD = tl.load(partial_ptr + from_X[:, None] * DIM + dims_D[None, :], mask=inside_XD, other=0.0)
        rescale = tl.exp2(largest - new_largest)
        acc_D = acc_D * rescale + tl.sum(partial_XD * weights_X[:, None], axis=0)
        total = total * rescale + tl.sum(weights_X, axis=0)
        largest = new_largest
    written_D = token * out_stride + head * DIM + dims_D
    tl.store(out_ptr + written_D, (acc_D / total).to(out_ptr.dtype.element_ty), mask=dims_D < DIM)


def decode_tile(dim: int, group: int, dtype: torch.dtype) -> Tile:
    """The tile of a head size: 16 KiB of keys and 16 KiB of values per stage. `dtype` is the cache's. On an H200 a
    batch of 64 contexts of 8k took 0.52 ms with four stages, 0.61 with three, of a floor of 0.51; in 8 bits 0.51 with
    128 positions in three stages, 0.75 with 64. Cards with 99 KiB of shared memory take three stages (70 KiB), of 8
    bits as many positions; not measured."""
    rounded, large = dtype.itemsize == 1, takes_large_tiles()
    positions = 16384 // (max(16, triton.next_power_of_2(dim)) * (dtype.itemsize if large else max(2, dtype.itemsize)))
    positions = min(128, max(16, positions))
    rows = max(16, triton.next_power_of_2(group))
    return Tile(rows=rows, positions=positions, warps=4, stages=3 if rounded == large else 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """`items_W6`: (row, token, first visible position, start, stop, slot of the partial result). Slot -1 is a whole
    row, row -1 is unused. `parts_R3`: (token, first slot, number of slots); 0 slots: nothing to reduce. Both int32."""

    items_W6: torch.Tensor
    parts_R3: torch.Tensor


def plan_decode(
    rows: Sequence[int] | NDArray[np.int64],
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    window: int | None,
    num_kv_heads: int,
    num_multiprocessors: int,
    min_item: int = _MIN_ITEM,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The arrays of a `DecodePlan`. Their shapes depend only on len(rows) and the last two settings before `min_item`.

    All items have one length, except the last of each row. It is the least length with no more items than wanted. The
    longest items come first, so that the last ones are short.
    """
    rows_R = np.asarray(rows, dtype=np.int64)
    stops_R = np.asarray(context_lens, dtype=np.int64)[rows_R]
    tokens_R = np.asarray(query_starts, dtype=np.int64)[rows_R]
    firsts_R = np.maximum(stops_R - window, 0) if window else np.zeros_like(stops_R)
    starts_R = firsts_R // _ALIGNMENT * _ALIGNMENT
    spans_R = stops_R - starts_R
    wanted = max(1, _PROGRAMS * num_multiprocessors // num_kv_heads)
    length = max(min_item, -(-int(spans_R.sum()) // wanted))
    length = -(-length // _GRAIN) * _GRAIN
    counts_R = np.maximum(1, -(-spans_R // length))
    slots_R = np.cumsum(counts_R) - counts_R
    owner_W = np.repeat(np.arange(len(rows_R)), counts_R)
    slot_W = np.arange(len(owner_W))
    start_W = starts_R[owner_W] + (slot_W - slots_R[owner_W]) * length
    stop_W = np.minimum(start_W + length, stops_R[owner_W])
    slot_W = np.where(counts_R[owner_W] > 1, slot_W, _WHOLE)
    listed = np.stack((rows_R[owner_W], tokens_R[owner_W], firsts_R[owner_W], start_W, stop_W, slot_W), axis=1)
    items_W6 = np.full((len(rows_R) + wanted, 6), _UNUSED, dtype=np.int32)
    items_W6[: len(listed)] = listed[np.argsort(start_W - stop_W, kind="stable")]
    parts_R3 = np.stack((tokens_R, slots_R, np.where(counts_R > 1, counts_R, 0)), axis=1).astype(np.int32)
    return items_W6, parts_R3


def paged_decode(
    q_TND: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_TND: torch.Tensor,
    block_tables_SB: torch.Tensor,
    *,
    plan: DecodePlan,
    scale: float,
    window: int | None,
    scales: KVScales | None = None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Writes the attention of the plan's tokens into `out_TND`. Its other tokens stay unchanged. `window` must be the
    plan's.

    Caches [NB, K, BS, D], of q's type or, with `scales`, of 8 bits; block tables int32. Rows without context give
    zeros.
    """
    cache = CachedBits.of(k_cache, v_cache, scales)
    group = check_paged(q_TND, cache, block_tables_SB)
    check_indices(items=plan.items_W6, parts=plan.parts_R3)
    assert out_TND.stride()[1:] == q_TND.stride()[1:], f"out has strides {out_TND.stride()}"
    assert window is None or window > 0, f"window is {window}"
    check_sinks(sinks_N, q_TND.shape[1])
    options = SoftmaxOptions.of(scale, softcap)
    (_, num_heads, dim), num_rows, num_items = q_TND.shape, len(plan.parts_R3), len(plan.items_W6)
    if num_rows == 0:
        return
    tile = tile or decode_tile(dim, group, k_cache.dtype)
    assert tile.positions % _ALIGNMENT == 0, f"tiles of {tile.positions} positions"
    padded_dim = max(16, triton.next_power_of_2(dim))
    partial_WND = torch.empty((num_items, num_heads, dim), dtype=torch.float32, device=q_TND.device)
    lse_WN = torch.empty((num_items, num_heads), dtype=torch.float32, device=q_TND.device)
    _decode[(num_items, k_cache.shape[1])](
        q_TND, cache.keys, cache.values, cache.key_scales, cache.value_scales, out_TND, partial_WND, lse_WN,
        plan.items_W6, block_tables_SB, sinks_N,
        q_TND.stride(0), out_TND.stride(0), k_cache.stride(0), cache.scales_stride, block_tables_SB.stride(0),
        options.scale_log2, options.cap_scale,
        G=group, DIM=dim, BLOCK_SIZE=k_cache.shape[2], WINDOW=window or 0,
        PRECISION="tf32x3" if q_TND.dtype == torch.float32 else "tf32", KIND=cache.kind,
        M=tile.rows, C=tile.positions, D=padded_dim, CAPPED=options.capped, HAS_SINKS=sinks_N is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    reduce_parts(partial_WND, lse_WN, out_TND, plan.parts_R3, sinks_N)


def reduce_parts(
    partial_WND: torch.Tensor,
    lse_WN: torch.Tensor,
    out_TND: torch.Tensor,
    parts_R3: torch.Tensor,
    sinks_N: torch.Tensor | None = None,
) -> None:
    """Writes the tokens of contexts in parts into `out_TND`: the parts' results by their log2-sum-exp."""
    _, num_heads, dim = partial_WND.shape
    padded_dim = max(16, triton.next_power_of_2(dim))
    sizes = {"DIM": dim, "X": _REDUCED, "D": padded_dim, "HAS_SINKS": sinks_N is not None}
    tensors = partial_WND, lse_WN, out_TND, parts_R3, sinks_N
    _reduce[(len(parts_R3), num_heads)](*tensors, out_TND.stride(0), **sizes, num_warps=2)
