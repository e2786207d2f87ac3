"""Latent attention over pages, in Triton: all query heads share one key, whose first `rank` numbers are its value
(DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1, absorbed).

A program takes H heads of one token that decodes, or of several tokens of a prompt: its queries are the rows of one
matrix product, so a latent that is loaded serves the scores of all of them, and then their sums. Work lists and the
reduction of contexts in parts are those of `paged_decode` and `prefill`. A latent's compressed part and its rotated
key are operands of their own: 576 is no power of two and would be padded to 1024.

Legend: T tokens, N query heads, H heads of a program, W = L + R numbers of a latent: L compressed, R rotated, P R / 2
pairs, M query rows of a tile, C positions of a tile, NB blocks of the cache, BS positions of a block, S rows, B blocks
of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.paged_decode import DecodePlan, reduce_parts
from workers.kernels.prefill import PrefillPlan
from workers.kernels.this_device import has_tensor_memory, takes_large_tiles
from workers.kernels.tile import SoftmaxOptions, Tile, check_indices, softmax_step


@triton.jit
def _item(items_ptr, PROMPTS: tl.constexpr):
    if PROMPTS:
        item_ptr = items_ptr + tl.program_id(0) * 4
        count, position = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
        start, stop, slot = position * 0, position + count, position * 0 - 1
    else:
        item_ptr = items_ptr + tl.program_id(0) * 6
        start, stop, slot = tl.load(item_ptr + 3), tl.load(item_ptr + 4), tl.load(item_ptr + 5)
        count, position = stop * 0 + 1, stop - 1
    row, token = tl.load(item_ptr), tl.load(item_ptr + 1).to(tl.int64)
    return row, token, count, position, start, stop, slot.to(tl.int64)


@triton.jit
def _over_context(
    q_ML, q_MR, queries_M, cache_ptr, table_ptr, start, stop, block_stride, scale_log2,
    RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, PROMPTS: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Attention to latents [start, stop) of one row: (result, sum, maximum). Block ids are fetched a tile ahead, as in
    `tile`."""
    dims_L, dims_R = tl.arange(0, L), tl.arange(0, R)
    inside_L, inside_R = dims_L < RANK, dims_R < ROTATED
    max_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc_ML = tl.zeros([M, L], tl.float32)
    positions_C = start + tl.arange(0, C)
    block_C = tl.load(table_ptr + positions_C // BLOCK_SIZE, mask=positions_C < stop, other=0)
    for tile in range(start, stop, C):
        positions_C = tile + tl.arange(0, C)
        next_C = positions_C + C
        next_block_C = tl.load(table_ptr + next_C // BLOCK_SIZE, mask=next_C < stop, other=0)
        loaded_C = positions_C < stop
        offsets_C = block_C.to(tl.int64) * block_stride + positions_C % BLOCK_SIZE * (RANK + ROTATED)
        latents_CL = cache_ptr + offsets_C[:, None] + dims_L[None, :]
        inside_CL = loaded_C[:, None] & inside_L[None, :]
        turned_CR = cache_ptr + offsets_C[:, None] + RANK + dims_R[None, :]
        k_CL = tl.load(latents_CL, mask=inside_CL, other=0.0)
        k_CR = tl.load(turned_CR, mask=loaded_C[:, None] & inside_R[None, :], other=0.0)
        scores_MC = tl.dot(q_ML, tl.trans(k_CL), input_precision="ieee")
        scores_MC = tl.dot(q_MR, tl.trans(k_CR), acc=scores_MC, input_precision="ieee")
        seen_MC = loaded_C[None, :]
        if PROMPTS:
            seen_MC = seen_MC & (positions_C[None, :] <= queries_M[:, None])
        scores_MC = tl.where(seen_MC, scores_MC, float("-inf"))
        weights_MC, max_M, sum_M, acc_ML = softmax_step(scores_MC, scale_log2, max_M, sum_M, acc_ML)
        acc_ML = tl.dot(weights_MC.to(k_CL.dtype), k_CL, acc=acc_ML, input_precision="ieee")
        block_C = next_block_C
    return acc_ML, sum_M, max_M


@triton.jit(do_not_specialize=["table_stride"])
def _attend_latents(
    q_ptr, cache_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, tables_ptr,
    q_stride, out_stride, block_stride, table_stride, scale_log2,
    N: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PROMPTS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Computes one item for H heads: tokens of a prompt, or a part of the context of a token that decodes, whose result
    goes to the work space with its log2-sum-exp."""
    row, token, count, position, start, stop, slot = _item(items_ptr, PROMPTS)
    if row < 0:
        return
    lanes_M, dims_L, dims_R = tl.arange(0, M), tl.arange(0, L), tl.arange(0, R)
    tokens_M, heads_M = lanes_M // H, tl.program_id(1) * H + lanes_M % H
    inside_M = (tokens_M < count) & (heads_M < N)
    mask_ML = inside_M[:, None] & (dims_L < RANK)[None, :]
    read_M = (token + tokens_M) * q_stride + heads_M * (RANK + ROTATED)
    q_ML = tl.load(q_ptr + read_M[:, None] + dims_L[None, :], mask=mask_ML, other=0.0)
    mask_MR = inside_M[:, None] & (dims_R < ROTATED)[None, :]
    q_MR = tl.load(q_ptr + read_M[:, None] + RANK + dims_R[None, :], mask=mask_MR, other=0.0)
    acc_ML, sum_M, max_M = _over_context(
        q_ML, q_MR, position + tokens_M, cache_ptr, tables_ptr + row.to(tl.int64) * table_stride, start, stop,
        block_stride, scale_log2, RANK, ROTATED, BLOCK_SIZE, PROMPTS, M, C, L, R,
    )  # fmt: skip
    out_ML = acc_ML / tl.where(sum_M > 0, sum_M, 1.0)[:, None]  # no context: zeros
    if slot < 0:
        written_M = (token + tokens_M) * out_stride + heads_M * RANK
        tl.store(out_ptr + written_M[:, None] + dims_L[None, :], out_ML.to(out_ptr.dtype.element_ty), mask=mask_ML)
    else:
        partial_M = slot * N + heads_M
        tl.store(partial_ptr + partial_M[:, None] * RANK + dims_L[None, :], out_ML, mask=mask_ML)
        tl.store(lse_ptr + partial_M, max_M + tl.log2(sum_M), mask=inside_M)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_latents(
    q_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    cache_ptr,
    slots_ptr,
    q_stride,
    latent_stride,
    block_stride,
    N: tl.constexpr,
    STILL: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = STILL + 2 * PAIRS
    from_ptr, to_ptr = q_ptr + token * q_stride + head * width, out_ptr + (token * N + head) * width
    kept = True
    if head == N:
        slot = tl.load(slots_ptr + token)
        kept = slot >= 0
        from_ptr = latent_ptr + token * latent_stride
        to_ptr = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * width
    dims_L, pairs_P = tl.arange(0, L), tl.arange(0, P)
    inside_L, inside_P = (dims_L < STILL) & kept, (pairs_P < PAIRS) & kept
    tl.store(to_ptr + dims_L, tl.load(from_ptr + dims_L, mask=inside_L, other=0.0), mask=inside_L)
    cos_P = tl.load(cos_ptr + token * PAIRS + pairs_P, mask=inside_P, other=0.0)
    sin_P = tl.load(sin_ptr + token * PAIRS + pairs_P, mask=inside_P, other=0.0)
    first_P = tl.load(from_ptr + STILL + pairs_P, mask=inside_P, other=0.0)
    second_P = tl.load(from_ptr + STILL + PAIRS + pairs_P, mask=inside_P, other=0.0)
    turned_first_P = first_P.to(tl.float32) * cos_P - second_P.to(tl.float32) * sin_P
    turned_second_P = second_P.to(tl.float32) * cos_P + first_P.to(tl.float32) * sin_P
    tl.store(to_ptr + STILL + pairs_P, turned_first_P.to(first_P.dtype), mask=inside_P)
    tl.store(to_ptr + STILL + PAIRS + pairs_P, turned_second_P.to(first_P.dtype), mask=inside_P)


def heads_of_program(num_heads: int, dtype: torch.dtype) -> int:
    """On cards with 227 KiB of shared memory up to 64, the rows of one instruction of Hopper's matrix units, so that
    128 heads load a latent twice; on others, and in float32, 16, the smallest product of matrix units."""
    most = 64 if takes_large_tiles() and dtype != torch.float32 else 16
    return min(most, int(triton.next_power_of_2(num_heads)))


def head_programs(num_heads: int, dtype: torch.dtype) -> int:
    return -(-num_heads // heads_of_program(num_heads, dtype))


def latent_tile(dtype: torch.dtype, *, heads: int, prompts: bool) -> Tile:
    """`heads` of a program. On an H200 64 rows of 64 positions took 1.2 ms for a prompt of 4k with 16 heads, 32 of 16
    positions 5.2; tokens of 128 heads that decode took 0.69 ms, 16 heads at a time 1.46. Not measured: with tensor
    memory 64 positions take 345 KiB of shared memory, and 32 take 209; on other cards 32 in three stages take 91 of 99.
    float32 takes 72 KiB everywhere, since products are exact: the three of tf32x3 take 104 and spill 2 KB a thread.
    """
    if dtype == torch.float32:
        return Tile(rows=16, positions=16, warps=4, stages=1)
    if takes_large_tiles():
        rows = 64 if prompts else max(16, heads)
        return Tile(rows=rows, positions=32 if has_tensor_memory() else 64, warps=4 if rows <= 16 else 8, stages=2)
    return Tile(rows=32, positions=16, warps=8, stages=3) if prompts else Tile(rows=16, positions=32, warps=4, stages=3)


def latent_write(
    q_TNW: torch.Tensor,
    latent_T1W: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Computes `reference.latent_write`. Tokens of a negative slot, which pad a CUDA graph's step, are not written."""
    num_tokens, num_heads, width = q_TNW.shape
    pairs = cos_TP.shape[1]
    assert q_TNW.stride()[1:] == (width, 1), f"q has strides {q_TNW.stride()}"
    assert latent_T1W.shape == (num_tokens, 1, width), f"latents are {tuple(latent_T1W.shape)}"
    assert latent_T1W.stride(2) == 1, f"latents have strides {latent_T1W.stride()}"
    assert cos_TP.is_contiguous(), f"cos has strides {cos_TP.stride()}"
    assert sin_TP.is_contiguous(), f"sin has strides {sin_TP.stride()}"
    _check_cache(q_TNW, cache)
    out_TNW = torch.empty(q_TNW.shape, dtype=q_TNW.dtype, device=q_TNW.device)
    if num_tokens == 0:
        return out_TNW
    still = width - 2 * pairs
    _write_latents[(num_tokens, num_heads + 1)](
        q_TNW,
        latent_T1W,
        cos_TP,
        sin_TP,
        out_TNW,
        cache,
        slots_T,
        q_TNW.stride(0),
        latent_T1W.stride(0),
        cache.stride(0),
        N=num_heads,
        STILL=still,
        PAIRS=pairs,
        BLOCK_SIZE=cache.shape[2],
        L=triton.next_power_of_2(still),
        P=triton.next_power_of_2(pairs),
        num_warps=2,
    )
    return out_TNW


def latent_decode(
    q_TNW: torch.Tensor,
    cache: torch.Tensor,
    out_TNL: torch.Tensor,
    block_tables_SB: torch.Tensor,
    *,
    plan: DecodePlan,
    scale: float,
    tile: Tile | None = None,
) -> None:
    """Writes the attention of the plan's tokens into `out_TNL`; its other tokens stay unchanged. Cache [NB, 1, BS, W].
    The plan counts `head_programs` as heads."""
    check_indices(items=plan.items_W6, parts=plan.parts_R3)
    num_items, num_heads, rank = len(plan.items_W6), q_TNW.shape[1], out_TNL.shape[2]
    if len(plan.parts_R3) == 0:
        return
    partial_WNL = torch.empty((num_items, num_heads, rank), dtype=torch.float32, device=q_TNW.device)
    lse_WN = torch.empty((num_items, num_heads), dtype=torch.float32, device=q_TNW.device)
    heads = heads_of_program(num_heads, q_TNW.dtype)
    tile = tile or latent_tile(q_TNW.dtype, heads=heads, prompts=False)
    _launch(q_TNW, cache, out_TNL, block_tables_SB, (partial_WNL, lse_WN), plan.items_W6, scale, tile, prompts=False)
    reduce_parts(partial_WNL, lse_WN, out_TNL, plan.parts_R3)


def latent_prefill(
    q_TNW: torch.Tensor,
    cache: torch.Tensor,
    out_TNL: torch.Tensor,
    block_tables_SB: torch.Tensor,
    *,
    plan: PrefillPlan,
    scale: float,
) -> None:
    """The same for the plan's tokens of prompts. The plan's group is `heads_of_program`."""
    check_indices(work=plan.work_W4)
    if len(plan.work_W4):
        nothing = (out_TNL, out_TNL)
        _launch(q_TNW, cache, out_TNL, block_tables_SB, nothing, plan.work_W4, scale, plan.tile, prompts=True)


def _launch(
    q_TNW: torch.Tensor,
    cache: torch.Tensor,
    out_TNL: torch.Tensor,
    block_tables_SB: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor],
    items: torch.Tensor,
    scale: float,
    tile: Tile,
    *,
    prompts: bool,
) -> None:
    (_, num_heads, width), rank = q_TNW.shape, out_TNL.shape[2]
    assert q_TNW.stride()[1:] == (width, 1), f"q has strides {q_TNW.stride()}"
    assert out_TNL.stride()[1:] == (rank, 1), f"out has strides {out_TNL.stride()}"
    assert block_tables_SB.dtype == torch.int32, f"block tables are {block_tables_SB.dtype}"
    assert block_tables_SB.stride(1) == 1, f"block tables have strides {block_tables_SB.stride()}"
    _check_cache(q_TNW, cache)
    _attend_latents[(len(items), head_programs(num_heads, q_TNW.dtype))](
        q_TNW,
        cache,
        out_TNL,
        *parts,
        items,
        block_tables_SB,
        q_TNW.stride(0),
        out_TNL.stride(0),
        cache.stride(0),
        block_tables_SB.stride(0),
        SoftmaxOptions.of(scale, 0.0).scale_log2,
        N=num_heads,
        H=heads_of_program(num_heads, q_TNW.dtype),
        RANK=rank,
        ROTATED=width - rank,
        BLOCK_SIZE=cache.shape[2],
        PROMPTS=prompts,
        M=tile.rows,
        C=tile.positions,
        L=max(16, triton.next_power_of_2(rank)),
        R=max(16, triton.next_power_of_2(width - rank)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _check_cache(q_TNW: torch.Tensor, cache: torch.Tensor) -> None:
    width, block_size = q_TNW.shape[2], cache.shape[2]
    assert cache.shape[1] == 1, f"the cache has {cache.shape[1]} heads"
    assert cache.shape[3] == width, f"latents are of {cache.shape[3]}, queries of {width}"
    assert cache.stride()[2:] == (width, 1), f"the cache has strides {cache.stride()}, blocks of {block_size}"
    assert cache.dtype == q_TNW.dtype, f"latents are {cache.dtype}, q is {q_TNW.dtype}"
