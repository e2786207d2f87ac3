"""What long computations leave to Python's collector of cycles."""

from __future__ import annotations

import gc
import weakref

import pytest

from cluster import collecting


class Part:
    """Of something whose parts know one another, as those of a deployment do."""

    def __init__(self) -> None:
        self.whole = [self]


def leave() -> weakref.ref[Part]:
    """A computation that goes on with what it has made, and what it was."""

    def compute() -> weakref.ref[Part]:
        part = Part()
        collecting.keep()
        return weakref.ref(part)

    with collecting.collecting_in_bulk():
        return compute()


@pytest.mark.parametrize("much", [0, collecting.MUCH], ids=["large", "small"])
def test_what_a_computation_leaves_is_gone_with_it(monkeypatch: pytest.MonkeyPatch, much: int) -> None:
    """A soak of 500 simulated clusters kept half a gigabyte of them: nobody looked at what each had kept."""
    monkeypatch.setattr(collecting, "MUCH", much)
    assert leave()() is None
    assert gc.get_freeze_count() == 0


def test_a_small_computation_does_not_look_at_what_others_have_left() -> None:
    """After each of them all that a process has was looked at, 0.6 s where that is much: tests took minutes longer."""
    gc.collect()
    others = weakref.ref(Part())
    assert leave()() is None
    assert others() is not None
    gc.collect()
    assert others() is None
