"""Python's collector of cycles in a process that answers requests: what it has loaded is never looked at again. By
default that was 8 % of what a short request costs, and now and then a pause of 0.1 to 0.3 s for everybody."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.huge_pages import gather

YOUNG = 10_000
"""Objects that are looked at together: more than some thirty requests have under way. A request leaves no circle behind
(`tests/unit/router/test_tap.py`), so that below this nothing is ever looked at; with 2,000 it was 8 % of a request."""
BULK = 50_000


def collect_rarely() -> None:
    """Once everything is loaded, on the event loop that serves. What is there stays: it is gathered on huge pages."""
    gc.collect()
    gc.freeze()
    gather()
    gc.set_threshold(YOUNG, 10, 10)
    # The loop keeps a list of all asynchronous generators that run, for its end: a request has ten, and ends each.
    sys.set_asyncgen_hooks(firstiter=None)


@contextmanager
def collecting_in_bulk() -> Iterator[None]:
    """For a long computation that nobody waits for step by step: young objects are looked at so many together that most
    are gone by then. `gc.freeze()` within it, once what stays to the end is there."""
    before = gc.get_threshold()
    gc.set_threshold(BULK, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
