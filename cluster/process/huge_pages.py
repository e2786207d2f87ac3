"""Moves loaded memory to pages of 2 MiB. An interpreter's objects lie on thousands of pages of 4 KiB, more than a
processor's TLB holds; on huge pages a short request costs a tenth less CPU (docs/performance.md, "The router").

Linux moves memory on request (MADV_COLLAPSE, since 6.1). Memory that it refuses to move stays where it is.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

HUGE = 2 * 2**20
_COLLAPSE = 25
_NUM_SMALL = HUGE // mmap.PAGESIZE
_FULL_ENOUGH = _NUM_SMALL // 2
"""Least share of a huge page's small pages in use. A nearly empty one, such as a thread's stack, would take more memory
than it has."""

Span = tuple[int, int]


def gather(spans: Iterable[Span] | None = None) -> int:
    """Bytes on huge pages afterwards, of these addresses or of all private memory. Takes about 2 ms per MiB."""
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "madvise") and hasattr(libc, "mincore")):
        return 0
    resident = (ctypes.c_ubyte * _NUM_SMALL)()
    num_gathered = 0
    for begin, end in private() if spans is None else spans:
        for at in range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
            place, size = ctypes.c_void_p(at), ctypes.c_size_t(HUGE)
            if libc.mincore(place, size, resident) or sum(one & 1 for one in resident) < _FULL_ENOUGH:
                continue
            num_gathered += not libc.madvise(place, size, _COLLAPSE)
    return num_gathered * HUGE


def private(maps: Path = Path("/proc/self/maps")) -> Iterator[Span]:
    """Address ranges of private, anonymous, written memory; none if the system does not list them."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        span, permissions, _, _, inode, *name = line.split()
        if permissions == "rw-p" and inode == "0" and (not name or name == ["[heap]"]):
            begin, end = span.split("-")
            yield int(begin, 16), int(end, 16)
