"""A run that takes long says how far it is, and is none the wiser for it."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
from rich.console import Console

from cluster.cli.terminal_tables import bars
from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.run_progress import Look, ProgressWatch
from cluster.simulate.run.simulation import simulate
from tests.unit.cluster.simulate.towns import sessions, town


def shown(num_ended: int, text: str, *, terminal: bool) -> str:
    """The output of a watch over 1,000 requests."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, _environ={})
    with bars(console) as bar, ProgressWatch(bar, 1000) as watch:
        watch.begin(lambda: (num_ended, text))
        watch.show()
    return file.getvalue()


def test_a_file_gets_a_line_with_requests_and_virtual_time() -> None:
    assert shown(100, "40 s of virtual time", terminal=False) == (
        "100 of 1,000 requests have ended: 40 s of virtual time\n"
    )


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    told = shown(100, "40 s of virtual time", terminal=True)
    assert "100/1000" in told
    assert "40 s of virtual time" in told
    assert told.rstrip("\r").rpartition("100/1000")[2].count("\x1b[2K"), "its line is emptied at the end"


def test_a_run_of_a_sweep_has_a_row_below_the_sweep_s() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={})
    sweep = bars(console)
    sweep.add_task("2 colocated", total=4)
    with ProgressWatch(sweep, 1000) as watch:
        watch.begin(lambda: (100, "40 s of virtual time"))
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
    num_ended, text = look()
    assert num_ended == sum(len(session.turns) for session in asked)
    assert float(text.split()[0]) >= outcome.duration_s - 1.0


def test_a_simulation_that_was_watched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: weakref.WeakSet[SimulatedDeployment] = weakref.WeakSet()
    start = SimulatedDeployment.start

    async def note(deployment: SimulatedDeployment) -> None:
        made.add(deployment)
        await start(deployment)

    monkeypatch.setattr(SimulatedDeployment, "start", note)
    with bars(Console(file=io.StringIO())) as bar, ProgressWatch(bar, 2) as watch:
        simulate(town(prefill=1, decode=1), sessions(num=2), watch=watch.begin)
        gc.collect()
        assert not made
