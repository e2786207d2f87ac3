"""Python's collector of cycles in a process that answers requests: what it has loaded is never looked at again, and
what requests leave behind is looked at less often. By default that was 8 % of what a short request costs."""

from __future__ import annotations

import gc

YOUNG = 20_000
"""Objects that are looked at together: a few requests' worth, and about a millisecond."""


def collect_rarely() -> None:
    """Once everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
