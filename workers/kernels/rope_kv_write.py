"""Rope and the write into the paged cache in one Triton kernel: q, k and v are read once and written once.

Legend: T tokens, N query heads, K key/value heads, D head dim, P D / 2 rotated pairs, H heads of one program, NB blocks
of the cache, BS positions of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.device_kernels import KVScales
from workers.kernels.quantised.cached_bits import INT8, PLAIN, CachedBits, int8_scale, to_fp8, to_int8


@triton.jit
def _turn(x_ptr, read_H, pairs_P, inside_HP, cos_P, sin_P, PAIRS: tl.constexpr):
    """The rotated halves of each head, in float32."""
    first_HP = tl.load(x_ptr + read_H[:, None] + pairs_P[None, :], mask=inside_HP, other=0.0)
    second_HP = tl.load(x_ptr + read_H[:, None] + PAIRS + pairs_P[None, :], mask=inside_HP, other=0.0)
    wide_first_HP, wide_second_HP = first_HP.to(tl.float32), second_HP.to(tl.float32)
    turned_first_HP = wide_first_HP * cos_P[None, :] - wide_second_HP * sin_P[None, :]
    turned_second_HP = wide_second_HP * cos_P[None, :] + wide_first_HP * sin_P[None, :]
    return turned_first_HP.to(first_HP.dtype), turned_second_HP.to(first_HP.dtype)


@triton.jit
def _store(out_ptr, written_H, pairs_P, inside_HP, first_HP, second_HP, PAIRS: tl.constexpr):
    tl.store(out_ptr + written_H[:, None] + pairs_P[None, :], first_HP, mask=inside_HP)
    tl.store(out_ptr + written_H[:, None] + PAIRS + pairs_P[None, :], second_HP, mask=inside_HP)


@triton.jit
def _write(
    cache_ptr, scales_ptr, block, offset, heads_H, pairs_P, inside_HP, inside_H, first_HP, second_HP, block_stride,
    scales_stride, KIND: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes a token's heads to their place in its block, rounded for an 8-bit cache."""
    written_H = block * block_stride + (heads_H * BLOCK_SIZE + offset) * 2 * PAIRS
    if KIND == PLAIN:
        _store(cache_ptr, written_H, pairs_P, inside_HP, first_HP, second_HP, PAIRS)
    elif KIND == INT8:
        scale_H = int8_scale(first_HP, second_HP)
        tl.store(scales_ptr + block * scales_stride + heads_H * BLOCK_SIZE + offset, scale_H, mask=inside_H)
        rounded_HP = to_int8(first_HP, scale_H), to_int8(second_HP, scale_H)
        _store(cache_ptr, written_H, pairs_P, inside_HP, rounded_HP[0], rounded_HP[1], PAIRS)
    else:
        scale_H = tl.load(scales_ptr + heads_H, mask=inside_H, other=1.0)
        rounded_HP = to_fp8(first_HP, scale_H), to_fp8(second_HP, scale_H)
        _store(cache_ptr, written_H, pairs_P, inside_HP, rounded_HP[0], rounded_HP[1], PAIRS)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rope_kv_write(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, slots_ptr,
    q_stride, k_stride, v_stride, k_block_stride, v_block_stride, scales_stride, KIND: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Handles H heads of one token: the first programs of a token take its queries, the others its keys and values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (N + H - 1) // H
    pairs_P = tl.arange(0, P)
    inside_P = pairs_P < PAIRS
    cos_P = tl.load(cos_ptr + token * PAIRS + pairs_P, mask=inside_P, other=0.0)
    sin_P = tl.load(sin_ptr + token * PAIRS + pairs_P, mask=inside_P, other=0.0)
    if part < query_parts:
        heads_H = part * H + tl.arange(0, H)
        inside_HP = (heads_H < N)[:, None] & inside_P[None, :]
        first_HP, second_HP = _turn(
            q_ptr, token * q_stride + heads_H * 2 * PAIRS, pairs_P, inside_HP, cos_P, sin_P, PAIRS
        )
        written_H = token * N * 2 * PAIRS + heads_H * 2 * PAIRS
        _store(out_ptr, written_H, pairs_P, inside_HP, first_HP, second_HP, PAIRS)
    else:
        slot = tl.load(slots_ptr + token)
        heads_H = (part - query_parts) * H + tl.arange(0, H)
        inside_H = (heads_H < K) & (slot >= 0)
        inside_HP = inside_H[:, None] & inside_P[None, :]
        first_HP, second_HP = _turn(
            k_ptr, token * k_stride + heads_H * 2 * PAIRS, pairs_P, inside_HP, cos_P, sin_P, PAIRS
        )
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        _write(
            k_cache_ptr, k_scales_ptr, block, offset, heads_H, pairs_P, inside_HP, inside_H, first_HP, second_HP,
            k_block_stride, scales_stride, KIND, PAIRS, BLOCK_SIZE,
        )  # fmt: skip
        read_HP = token * v_stride + heads_H[:, None] * 2 * PAIRS + pairs_P[None, :]
        first_HP = tl.load(v_ptr + read_HP, mask=inside_HP, other=0.0)
        second_HP = tl.load(v_ptr + read_HP + PAIRS, mask=inside_HP, other=0.0)
        _write(
            v_cache_ptr, v_scales_ptr, block, offset, heads_H, pairs_P, inside_HP, inside_H, first_HP, second_HP,
            v_block_stride, scales_stride, KIND, PAIRS, BLOCK_SIZE,
        )  # fmt: skip


def rope_kv_write(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """`reference.rope_kv_write`. q, k and v may be views into one [T, (N + 2 K) D]; each token's heads are contiguous.
    The caches are [NB, K, BS, D] with contiguous blocks, in 8 bits where there are `scales`. A slot below 0 (padding of
    a CUDA graph) is not written."""
    (num_tokens, num_heads, dim), num_kv_heads, block_size = q_TND.shape, k_TKD.shape[1], k_cache.shape[2]
    cache = CachedBits.of(k_cache, v_cache, scales)
    _check_heads(q_TND, k_TKD, v_TKD, cache)
    for name, angles_TP in (("cos", cos_TP), ("sin", sin_TP)):
        assert angles_TP.shape == (num_tokens, dim // 2), f"{name} is {tuple(angles_TP.shape)}"
        assert angles_TP.is_contiguous(), f"{name} has strides {angles_TP.stride()}"
        assert angles_TP.dtype == torch.float32, f"{name} is {angles_TP.dtype}"
    assert slots_T.shape == (num_tokens,), f"slots are {tuple(slots_T.shape)} for {num_tokens} tokens"
    assert slots_T.is_contiguous(), f"slots have strides {slots_T.stride()}"
    assert slots_T.dtype == torch.int64, f"slots are {slots_T.dtype}"
    out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    if num_tokens == 0:
        return out_TND
    # 8 heads of 128 are 512 pairs: each thread of two warps loads 16 bytes in bfloat16, and a decode step of 64 rows of
    # an 8B model still has 320 programs. Chosen by reasoning, not measured yet.
    heads = min(8, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    _rope_kv_write[grid](
        q_TND,
        k_TKD,
        v_TKD,
        cos_TP,
        sin_TP,
        out_TND,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        slots_T,
        q_TND.stride(0),
        k_TKD.stride(0),
        v_TKD.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        cache.scales_stride,
        KIND=cache.kind,
        N=num_heads,
        K=num_kv_heads,
        PAIRS=dim // 2,
        BLOCK_SIZE=block_size,
        H=heads,
        P=triton.next_power_of_2(dim // 2),
        num_warps=2,
    )
    return out_TND


def _check_heads(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: CachedBits) -> None:
    (num_tokens, _, dim), num_kv_heads, block_size = q_TND.shape, k_TKD.shape[1], cache.keys.shape[2]
    dtype = cache.keys.dtype if cache.kind == PLAIN else q_TND.dtype
    assert k_TKD.shape == v_TKD.shape == (num_tokens, num_kv_heads, dim), f"k {k_TKD.shape}, v {v_TKD.shape}"
    for name, x_THD in (("q", q_TND), ("k", k_TKD), ("v", v_TKD)):
        assert x_THD.stride()[1:] == (dim, 1), f"{name} has strides {x_THD.stride()}"
        assert x_THD.dtype == dtype, f"{name} is {x_THD.dtype}, the cache {dtype}"
    for name, part in (("keys", cache.keys), ("values", cache.values)):
        assert part.shape[1:] == (num_kv_heads, block_size, dim), f"cached {name} are {tuple(part.shape)}"
        assert part.stride()[1:] == (block_size * dim, dim, 1), f"cached {name} have strides {part.stride()}"
