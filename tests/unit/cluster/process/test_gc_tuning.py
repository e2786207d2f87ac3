"""What long computations leave to Python's collector of cycles."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from cluster.process import gc_tuning
from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.progress import ProgressWatch
from cluster.simulate.run.simulation import simulate
from tests.unit.cluster.simulate.towns import sessions, town


@pytest.fixture(autouse=True)
def _frozen_by_the_suite() -> Iterator[None]:
    """Is not, meanwhile (forked_runner.py)."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.collect()
        gc.freeze()


class Part:
    """Of something whose parts know one another, as those of a deployment do."""

    def __init__(self) -> None:
        self.whole = [self]


def leave() -> tuple[weakref.ref[Part], int]:
    """What a computation has made, and how much was kept in the middle of it."""

    def compute(keep: Callable[[], None]) -> tuple[weakref.ref[Part], int]:
        part, before = Part(), gc.get_freeze_count()
        keep()
        return weakref.ref(part), gc.get_freeze_count() - before

    with gc_tuning.collecting_in_bulk() as keep:
        return compute(keep)


@pytest.mark.parametrize("much", [0, gc_tuning.MUCH], ids=["large", "small"])
def test_what_a_computation_leaves_is_gone_with_it(monkeypatch: pytest.MonkeyPatch, much: int) -> None:
    """A soak of 500 simulated clusters kept half a gigabyte of them: nobody looked at what each had kept."""
    monkeypatch.setattr(gc_tuning, "MUCH", much)
    part, num_kept = leave()
    assert part() is None
    assert (num_kept > 0) == (much == 0)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("much", [0, gc_tuning.MUCH], ids=["large", "small"])
def test_what_a_process_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch, much: int) -> None:
    """A simulation in a process that answers requests had all that was loaded looked at from then on."""
    monkeypatch.setattr(gc_tuning, "MUCH", much)
    gc.freeze()
    frozen = gc.get_freeze_count()
    part, num_kept = leave()
    assert part() is None
    assert num_kept <= 0, "of what was frozen some may be freed meanwhile, and nothing joins it"
    assert gc.get_freeze_count() > 0.9 * frozen


def test_a_small_computation_does_not_look_at_what_others_have_left() -> None:
    """After each of them all that a process has was looked at, 0.6 s where that is much: tests took minutes longer."""
    gc.collect()
    others = weakref.ref(Part())
    part, _ = leave()
    assert part() is None
    assert others() is not None
    gc.collect()
    assert others() is None


def test_small_computations_do_not_have_the_whole_process_looked_at_more_often() -> None:
    """Python looks at all when a quarter of it is new, by what was left when it last did."""

    def num_looks(computing: bool) -> int:
        gc.collect()
        before = gc.get_stats()[2]["collections"]
        for _ in range(10):
            if computing:
                leave()
            others.append([[] for _ in range(20_000)])
        return int(gc.get_stats()[2]["collections"] - before)

    others: list[object] = [[] for _ in range(500_000)]
    assert num_looks(computing=True) <= num_looks(computing=False)


def test_a_simulation_that_was_watched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had watched one kept it: a sweep of 48 clusters ended with all of them in memory."""
    made: weakref.WeakSet[SimulatedDeployment] = weakref.WeakSet()
    start = SimulatedDeployment.start

    async def note(deployment: SimulatedDeployment) -> None:
        made.add(deployment)
        await start(deployment)

    monkeypatch.setattr(SimulatedDeployment, "start", note)
    with ProgressWatch(Console(file=io.StringIO()), num_requests=2, until_s=1.0) as watch:
        simulate(town(prefill=1, decode=1), sessions(num=2), watch=watch.begin)
        assert not made
