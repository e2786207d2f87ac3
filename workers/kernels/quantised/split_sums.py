"""Sums that several programs make a share of each, in one launch: the last to arrive adds the shares in their order.

Legend: N outputs of a tile, M rows of a tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_cuda: Any = torch.cuda

BLOCK_N = 64  # outputs that lie side by side in a packed weight, and the outputs of a tile of few rows

_PROGRAMS = 4
"""Programs wanted on each multiprocessor when sums are split: four tiles of 64 outputs with 16 KiB of codes under way
each are 2.5 times what 3.35 TB/s at a latency of 1 us need of each of 132 multiprocessors, and fit beside one another
in shared memory. On an H200 eight were no faster."""

_MOST_BLOCKS = 1024  # whose sums are split: two for each multiprocessor
_GRAPHS = -1

_MIN_STEPS = 4  # of a share: fewer do not pay for its partial sums


def splits_of(num_blocks: int, row_blocks: int, num_steps: int, num_multiprocessors: int) -> tuple[int, int]:
    """Shares of a sum, and steps of each. Both depend on the weight and the card alone, so that every batch of one
    block of rows is summed in the same order."""
    assert _PROGRAMS * num_multiprocessors <= 2 * _MOST_BLOCKS, f"{num_multiprocessors} multiprocessors"
    wanted = _PROGRAMS * num_multiprocessors // num_blocks if row_blocks == 1 else 1
    per_split = triton.cdiv(num_steps, max(1, min(wanted, num_steps // _MIN_STEPS)))
    return triton.cdiv(num_steps, per_split), per_split


def work_space(splits: int, num_outputs: int, num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Allocates partial sums, of four bytes each; [1] for none."""
    size = splits * num_outputs * num_rows if splits > 1 else 1
    return torch.empty(size, dtype=torch.float32, device=like.device)


def arrivals(device: torch.device) -> torch.Tensor:
    """The counters of a launch that splits its sums, zero before and after it. The launches of a stream follow one
    another and share an array; so do CUDA graphs, which are replayed one at a time. The array of graphs must be there
    before one is recorded: the step that runs eagerly before that makes it."""
    graphs = _counters(device, _GRAPHS)
    return graphs if (stream := _stream_of(device)) == _GRAPHS else _counters(device, stream)


def _stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return _GRAPHS if _cuda.is_current_stream_capturing() else int(_cuda.current_stream(device).cuda_stream)


@cache
def _counters(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


@triton.jit
def add_shares(acc_NM, partial_ptr, arrived_ptr, block, num_blocks, N: tl.constexpr, M: tl.constexpr):
    """Returns (is this program the last of its block, the block's sums). Resets the counter to 0 for the next
    launch."""
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    offsets_NM = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(partial_ptr + (split * num_blocks + block) * (N * M) + offsets_NM, acc_NM)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    is_last = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        acc_NM = tl.zeros([N, M], acc_NM.dtype)
        for share in range(num_splits):
            share_ptr = partial_ptr + (share * num_blocks + block) * (N * M)
            acc_NM += tl.load(share_ptr + offsets_NM, cache_modifier=".cg")
        tl.store(arrived_ptr + block, 0)
    return is_last, acc_NM
