"""A run that takes long says how far it is, and is none the wiser for it."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
from rich.console import Console

from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.run_progress import Look, ProgressWatch, RunProgress, bars
from cluster.simulate.run.simulation import simulate
from tests.unit.cluster.simulate.towns import sessions, town


class Clock:
    """Real time, as a test has it pass."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shown(*standings: tuple[float, RunProgress], terminal: bool) -> str:
    """What a watch of 1,000 requests, the last of which comes after 200 s, has written by its end."""
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, _environ={})
    with bars(console) as bar, ProgressWatch(bar, num_requests=1000, until_s=200.0, clock=clock) as watch:
        for clock.now_s, standing in standings:
            watch.begin(lambda standing=standing: standing)  # type: ignore[misc]
            watch.show()
    return file.getvalue()


def test_lines_tell_of_requests_virtual_time_and_what_is_left() -> None:
    told = shown(
        (30.0, RunProgress(num_made=4, num_workers=4, num_ended=2, at_s=0.5)),
        (60.0, RunProgress(num_made=4, num_workers=4, num_ended=100, at_s=40.0)),
        (1800.0, RunProgress(num_made=4, num_workers=4, num_ended=900, at_s=500.0)),
        terminal=False,
    )
    assert told.splitlines() == [
        "2 of 1,000 requests have ended in 0 s of virtual time",
        "100 of 1,000 requests have ended in 40 s of virtual time, about 9 min left",
        "900 of 1,000 requests have ended in 500 s of virtual time, about 3 min left",
    ]


def test_where_nobody_asks_for_long_virtual_time_says_what_is_left() -> None:
    """As in a trace with a gap: half of its requests have ended, a tenth of its time is over."""
    standing = RunProgress(num_made=4, num_workers=4, num_ended=500, at_s=20.0)
    assert "about 18 min left" in shown((120.0, standing), terminal=False)


def test_while_workers_start_it_is_told_how_many_there_are() -> None:
    """Thousands take a while, in which no request can end."""
    half = RunProgress(num_made=1200, num_workers=4000)
    assert shown((30.0, half), terminal=False).splitlines() == ["1,200 of 4,000 workers made"]
    assert "1,200 of 4,000 workers made" in shown((1.0, half), terminal=True)


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    told = shown((60.0, RunProgress(num_made=4, num_workers=4, num_ended=100, at_s=40.0)), terminal=True)
    assert "100/1000" in told
    assert "40 virtual s, about 9 min left" in told
    assert told.rstrip("\r").rpartition("100/1000")[2].count("\x1b[2K"), "its line is emptied at the end"


def test_a_run_of_a_sweep_has_a_row_below_the_sweep_s() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={})
    sweep = bars(console)
    sweep.add_task("2 colocated", total=4)
    with ProgressWatch(sweep, num_requests=1000, until_s=200.0) as watch:
        watch.begin(lambda: RunProgress(num_made=4, num_workers=4, num_ended=100, at_s=40.0))
        watch.show()
        assert [(row.completed, row.total) for row in sweep.tasks] == [(0, 4), (100, 1000)]
    assert [row.description for row in sweep.tasks] == ["2 colocated"], "it goes with its run"


def test_a_run_can_be_looked_at_and_is_the_same_for_it() -> None:
    looks: list[Look | None] = []
    asked = sessions("conversations", num=20)
    outcome = simulate(town(), asked, watch=looks.append)
    assert outcome.fingerprint == simulate(town(), asked).fingerprint
    look, over = looks
    assert look is not None
    assert over is None
    standing = look()
    assert (standing.num_made, standing.num_workers) == (4, 4)
    assert standing.num_ended == sum(len(session.turns) for session in asked)
    assert standing.at_s is not None
    assert standing.at_s >= outcome.duration_s


def test_a_simulation_that_was_watched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had watched one kept it: a sweep of 48 clusters ended with all of them in memory."""
    made: weakref.WeakSet[SimulatedDeployment] = weakref.WeakSet()
    start = SimulatedDeployment.start

    async def note(deployment: SimulatedDeployment) -> None:
        made.add(deployment)
        await start(deployment)

    monkeypatch.setattr(SimulatedDeployment, "start", note)
    with bars(Console(file=io.StringIO())) as bar, ProgressWatch(bar, num_requests=2, until_s=1.0) as watch:
        simulate(town(prefill=1, decode=1), sessions(num=2), watch=watch.begin)
        gc.collect()
        assert not made
