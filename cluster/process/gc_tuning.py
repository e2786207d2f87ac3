"""Python's collector of cycles in a process that answers requests: what it has loaded is never looked at again. By
default that was 8 % of what a short request costs, and now and then a pause of 0.1 to 0.3 s for everybody."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.process.huge_pages import gather

YOUNG = 10_000
"""Objects that are looked at together: more than some thirty requests have under way. A request leaves no circle behind
(`tests/unit/router/streaming/test_tap.py`), so that below this nothing is ever looked at; with 2,000 it was 8 % of a
request."""
BULK = 500_000
"""Ten times fewer, and 2 % of a long simulation went on looking at what was to be gone soon."""
MUCH = 50_000
"""Objects that it takes 10 ms to look at."""
GROWN = 256 * 2**20
"""Bytes below which it is not worth it: half a second."""


def collect_rarely() -> None:
    """Once everything is loaded, on the event loop that serves. What is there stays: it is gathered on huge pages."""
    gc.collect()
    gc.freeze()
    gather()
    gc.set_threshold(YOUNG, 10, 10)
    # The loop keeps a list of all asynchronous generators that run, for its end: a request has ten, and ends each.
    sys.set_asyncgen_hooks(firstiter=None)


@contextmanager
def collecting_in_bulk() -> Iterator[Callable[[], None]]:
    """For a long computation that nobody waits for step by step: young objects are looked at so many together that most
    are gone by then, and memory is gathered on huge pages whenever it has grown by a quarter. What it yields is called
    once what stays to the end is there: if that is much, the collector comes back to it no more. At the end what the
    computation has left is looked at, and nothing else unless it was much: many small ones one after the other cost no
    more in a process that has loaded much."""
    before, gathered = gc.get_threshold(), resident()
    is_much = False

    def looked(phase: str, info: dict[str, int]) -> None:
        nonlocal gathered, is_much
        is_much = is_much or info["generation"] > 0  # some of it is of the oldest now
        if phase == "stop" and resident() > gathered + max(GROWN, gathered // 4):
            gather()
            gathered = resident()

    def keep() -> None:
        nonlocal is_much
        num_young, *num_collections = gc.get_count()
        if num_young > MUCH or any(num_collections):
            is_much = True
            gc.freeze()

    try:
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
                gc.unfreeze()
                gc.collect()
            else:  # none of it is of the oldest: of a look at those, which finds next to nothing, Python would believe
                gc.collect(1)  # that this is all there is, and look at all the process when a quarter of it is new
        finally:
            gc.unfreeze()


def resident(statm: Path = Path("/proc/self/statm")) -> int:
    """Bytes of memory that this process has now: less than before, where an earlier run's has been given back. 0 where
    nothing says so: there is nothing to be gathered there either (`huge_pages.private`)."""
    try:
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
