"""Tunes Python's garbage collector for processes that answer requests: it never scans again what was loaded at the
start. By default collection took 8 % of a short request's CPU time, and paused all requests for 0.1 to 0.3 s now and
then."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.process.huge_pages import gather

YOUNG = 10_000
"""Allocations before a collection: more than some thirty running requests make. A request leaves no reference cycle
behind (`tests/unit/router/streaming/test_tap.py`), so fewer are never scanned. With 2,000 collections took 8 % of a
request."""
BULK = 500_000
"""Allocations before a collection. With a tenth, scanning soon dead objects took 2 % of a long simulation."""
MUCH = 50_000
"""Objects; they take about 10 ms to scan."""
GROWN = 256 * 2**20
"""Below this many bytes it is not worth half a second."""


def collect_rarely() -> None:
    """Called once everything is loaded, on the event loop that serves. Freezes the objects there are and moves them to
    huge pages."""
    gc.collect()
    gc.freeze()
    gather()
    gc.set_threshold(YOUNG, 10, 10)
    # The event loop tracks running asynchronous generators to close them at its end; a request has ten and closes each
    # itself.
    sys.set_asyncgen_hooks(firstiter=None)


@contextmanager
def collecting_in_bulk() -> Iterator[Callable[[], None]]:
    """For a long computation without latency goals: collects rarely, when most young objects are already free, and
    moves memory to huge pages whenever it has grown by a quarter. Call the function it yields once long-lived objects
    exist: if there are many, later collections skip them. At the end only the computation's own objects are scanned,
    and older ones only if it left many. What was frozen before stays frozen (Python cannot unfreeze a part): then
    nothing else is frozen meanwhile."""
    before, gathered = gc.get_threshold(), resident()
    is_much, freezes = False, not gc.get_freeze_count()

    def looked(phase: str, info: dict[str, int]) -> None:
        nonlocal gathered, is_much
        is_much = is_much or info["generation"] > 0  # a part of it is in the oldest generation now
        if phase == "stop" and resident() > gathered + max(GROWN, gathered // 4):
            gather()
            gathered = resident()

    def keep() -> None:
        nonlocal is_much
        num_young, *num_collections = gc.get_count()
        if num_young > MUCH or any(num_collections):
            is_much = True
            if freezes:
                gc.freeze()

    try:
        if freezes:
            gc.freeze()
        gc.set_threshold(BULK, 10, 10)
        gc.callbacks.append(looked)
        yield keep
    finally:
        if looked in gc.callbacks:
            gc.callbacks.remove(looked)
        gc.set_threshold(*before)
        try:
            if is_much:
                if freezes:
                    gc.unfreeze()
                gc.collect()
            else:  # None of it is in the oldest generation. A full collection would find little here, and Python would
                gc.collect(1)  # conclude that the process is small, and scan it all whenever it grows by a quarter.
        finally:
            if freezes:
                gc.unfreeze()


def resident(statm: Path = Path("/proc/self/statm")) -> int:
    """Resident bytes of this process; less than before if an earlier run's memory was returned. 0 if the system does
    not report them; then huge pages are not available either (`huge_pages.private`)."""
    try:
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
