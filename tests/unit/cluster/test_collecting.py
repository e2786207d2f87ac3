"""What long computations leave to Python's collector of cycles."""

from __future__ import annotations

import gc
import weakref

import pytest

from cluster import collecting


class Part:
    """Of something whose parts know one another, as those of a deployment do."""

    def __init__(self) -> None:
        self.whole: list[object] = [self, *([] for _ in range(1000))]


def leave() -> weakref.ref[Part]:
    """A computation that freezes what it has made, and what it was."""
    with collecting.collecting_in_bulk():
        part = Part()
        gc.freeze()
        return weakref.ref(part)


def test_what_computations_leave_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak of 500 simulated clusters kept half a gigabyte of them: nobody looked at what each had frozen."""
    gc.collect()
    monkeypatch.setattr(collecting, "BULK", len(gc.get_objects()) + 10_000)
    left = [leave() for _ in range(50)]
    assert sum(one() is not None for one in left) < 25
