"""Memory on huge pages, if the system has them: data that each step reads in full is read a third faster, because fewer
addresses are translated. Intermediate results of a long step use such pages, too; the pages are kept for the next
layer."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress
from math import prod

import torch

HUGE_PAGE = 1 << 21

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_NEVER, _LARGE = 1 << 30, 1 << 21
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
_LINE = 64
_LEAST_SHARED = 1 << 16
_SHARED_BYTES = 64 << 20
_COLLIDING = 1024  # bytes: rows with this distance share few places of a cache


def roomy_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros on the CPU for long use. Pages are allocated on their first write, as for torch's zeros. Tensors
    share regions, each of which lives as long as its last tensor: alone, each would fill up its last huge page."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_SHARED or _ADVICE is None:
        return torch.zeros(shape, dtype=dtype)
    if num_bytes < _SHARED_BYTES:
        return _SHARED.take(num_bytes).view(dtype).view(shape)
    whole = torch.frombuffer(_region(num_bytes), dtype=torch.uint8)  # which keeps the region
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)


def empty_rows(num_rows: int, width: int, *, dtype: torch.dtype, stride: int = 0) -> torch.Tensor:
    """An uninitialised tensor [num_rows, width], with `stride` elements from row to row (0: contiguous rows).

    Large tensors use memory that is kept. It is reused once the last reference to the tensor, or to a part of it, has
    been dropped.
    """
    stride = stride or width
    num_bytes = num_rows * stride * dtype.itemsize
    if num_bytes < HUGE_PAGE // 2 or _ADVICE is None:
        small = torch.empty(num_rows, stride, dtype=dtype)
        return small if stride == width else small[:, :width]
    region = _KEPT.take(num_bytes)
    held = memoryview(region)  # freed with the tensor's memory
    weakref.finalize(held, _KEPT.give_back, region).atexit = False
    whole = torch.frombuffer(held, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(num_rows, stride)[:, :width]


def apart(width: int, dtype: torch.dtype) -> int:
    """A stride for rows of `width` that are read column by column, so that rows do not evict one another from a
    cache."""
    line = _LINE // dtype.itemsize
    return width if width * dtype.itemsize % _COLLIDING else width + line


class SharedRegions:
    """Parts of large regions, given out once and in order: all are zeros. Callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], on a boundary of a cache line."""
        size = -(-num_bytes // _LINE) * _LINE
        with self._lock:
            if len(self._rest) < size:
                whole = torch.frombuffer(_region(_SHARED_BYTES), dtype=torch.uint8)  # which keeps the region
                start = -whole.data_ptr() % HUGE_PAGE
                self._rest = whole[start : start + _SHARED_BYTES]
            taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken


_SHARED = SharedRegions()


class Regions:
    """Reusable regions of memory. There are never more, free and taken, than were taken at the same time. Callable from
    any thread."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> mmap.mmap:
        """The smallest free region that is large enough; otherwise a new one, for which the largest free region is
        released."""
        while free := sorted(self._free, key=len):
            fitting = [region for region in free if len(region) >= num_bytes + HUGE_PAGE]
            best = fitting[0] if fitting else free[-1]
            try:
                self._free.remove(best)
            except ValueError:  # taken by another thread
                continue
            if fitting:
                return best
            break
        return _region(num_bytes)

    def give_back(self, region: mmap.mmap) -> None:
        self._free.append(region)


_KEPT = Regions()


def _region(num_bytes: int) -> mmap.mmap:
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _ADVICE is not None:
        with suppress(OSError):  # a system without huge pages: small pages are used
            region.madvise(_ADVICE)
    return region


def keep_freed_memory() -> None:
    """Lets glibc keep memory that a step frees for the next step: fresh pages would have to be zeroed in each step. The
    process never holds more than its peak. Other C libraries are left as they are."""
    _set_malloc(_NEVER)


def return_freed_memory() -> None:
    """Makes the C library return freed memory at once, so that stored and packed tensors of only one layer are in
    memory together. Lasts until `keep_freed_memory`."""
    _set_malloc(_LARGE)


def trim_freed_memory() -> None:
    """Returns pages that a load has freed, in every thread's part of the heap, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_malloc(threshold: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            set_option(option, threshold)
