"""Copies of KV blocks in Triton. They are gathered into one piece before a transfer and scattered after it, with all
layers in one launch.

Legend: L layers, NB blocks of the cache, K key/value heads, BS positions of a block, D head dim. A run is one block's
part of one layer's keys or values: K * BS * D contiguous elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 8 KiB of bfloat16 a program, four loads of 16 bytes a thread: enough bytes under way to fill the memory's pipeline
# with a few programs on each multiprocessor. Chosen by reasoning, not measured yet.
_CHUNK = 4096
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def _copy_runs(
    cache_ptr, ids_ptr, payload_ptr, num_blocks, num_ids, RUN: tl.constexpr, CHUNK: tl.constexpr, OUT: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = elements < RUN
    block = tl.load(ids_ptr + index)
    in_cache = cache_ptr + (part * num_blocks + block) * RUN + elements
    in_payload = payload_ptr + (part * num_ids + index) * RUN + elements
    if OUT:
        tl.store(in_payload, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_payload, mask=inside), mask=inside)


def gather(cache: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`reference.gather`: blocks of a contiguous [L, 2, NB, K, BS, D], copied to [L, 2, ids, K, BS, D]. The
    dimensions after NB are copied as one run."""
    shape = (*cache.shape[:2], len(block_ids), *cache.shape[3:])
    payload = torch.empty(shape, dtype=cache.dtype, device=cache.device) if out is None else out
    assert payload.shape == shape, f"out is {tuple(payload.shape)}, the blocks are {shape}"
    assert payload.is_contiguous(), f"out has strides {payload.stride()}"
    _launch(cache, block_ids, payload, out=True)
    return payload


def scatter(cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor) -> None:
    """`reference.scatter`. The ids must be distinct: two writers of a block have no order."""
    shape = (*cache.shape[:2], len(block_ids), *cache.shape[3:])
    assert payload.shape == shape, f"payload {tuple(payload.shape)} does not fit {shape}"
    assert payload.dtype == cache.dtype, f"payload is {payload.dtype}, the cache {cache.dtype}"
    _launch(cache, block_ids, payload.contiguous(), out=False)


def _launch(cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor, *, out: bool) -> None:
    assert cache.is_contiguous(), f"the cache is {tuple(cache.shape)} with strides {cache.stride()}"
    assert block_ids.is_contiguous(), f"block ids have strides {block_ids.stride()}"
    assert block_ids.dtype in (torch.int32, torch.int64), f"block ids are {block_ids.dtype}"
    if len(block_ids) == 0:
        return
    run = cache[0, 0, 0].numel()
    grid = (len(block_ids), cache.shape[0] * 2, triton.cdiv(run, _CHUNK))
    _copy_runs[grid](
        cache, block_ids, payload, cache.shape[2], len(block_ids), RUN=run, CHUNK=_CHUNK, OUT=out, num_warps=_NUM_WARPS
    )
