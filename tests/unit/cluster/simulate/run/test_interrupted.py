"""Ctrl-C in `baton simulate`: what was done is kept, nothing is told that did not happen, and it ends with 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.simulate.run import soak_trial
from cluster.simulate.run.soak_trial import SoakTrial
from cluster.simulate.world.event_log import SimulationLog
from tests.unit.cluster.simulate.asking import SMALL, call


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int, kind: str = "") -> None:
    """Presses Ctrl-C after so many events of this kind."""
    note, left = SimulationLog.note, [number]

    def note_and_interrupt(event_log: SimulationLog, told: str, subject: str, **facts: object) -> None:
        note(event_log, told, subject, **facts)
        if told.startswith(kind):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SimulationLog, "note", note_and_interrupt)


def test_the_event_log_ends_where_the_run_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole.log", tmp_path / "cut.log"
    assert call(*SMALL, "--events", str(whole)).exit_code == 0
    interrupt_at(monkeypatch, 20, "asked")
    figures = tmp_path / "run.json"
    figures.write_text("of an earlier run")
    result = call(*SMALL, "--events", str(cut), "--json", str(figures))
    assert result.exit_code == 130
    assert figures.read_text() == "of an earlier run"
    lines = cut.read_text().splitlines()
    assert lines == whole.read_text().splitlines()[: len(lines)]
    assert sum(" asked " in line for line in lines) == 20
    assert result.stderr == f"interrupted at {float(lines[-1].split()[0]):.2f} s of the load\n"


def test_a_run_that_is_interrupted_before_its_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 1, "worker serves")
    result = call(*SMALL)
    assert result.exit_code == 130
    assert result.stderr == "interrupted before the load began\n"


def test_an_interrupted_soak_reports_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[SoakTrial] = []

    def run(made: SoakTrial) -> None:
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        done.append(made)
        if len(done) == 2:
            raise AssertionError("a block is lost")

    monkeypatch.setattr(soak_trial, "run", run)
    result = call("--soak", "50")
    assert result.exit_code == 130
    assert result.stdout == "3 clusters in trouble, 1 broken\n"
    assert result.stderr.splitlines()[-1] == "interrupted: 3 of 50 clusters done"


def test_an_interrupted_sweep_reports_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sweep.json"
    sweep = (*SMALL, "cluster.colocated=1:4", "objectives.ttft_ms=900", "--json", str(file))
    interrupt_at(monkeypatch, 70, "asked")
    result = call(*sweep)
    assert result.exit_code == 130
    assert "2 colocated tp1 slo" in result.stdout
    assert "3 colocated tp1 slo" not in result.stdout
    assert (
        "of the 2 of 4 clusters done, the cheapest that reaches the objective for 95% of the requests: 1 colocated"
        in result.stdout
    )
    report = json.loads(file.read_text())
    assert (len(report["runs"]), report["num_done"], report["num_possible"]) == (2, 2, 4)
    assert result.stderr.splitlines()[-1] == "interrupted: 2 of 4 clusters done"
    interrupt_at(monkeypatch, 70, "asked")
    result = call(*sweep, "objectives.ttft_ms=0.001")
    assert result.exit_code == 130
    assert "of the 2 of 4 clusters done, no cluster reaches the objective for 95% of the requests" in result.stdout
    file.unlink()
    interrupt_at(monkeypatch, 1, "asked")
    result = call(*sweep)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == "interrupted: 0 of 4 clusters done"
    assert not file.exists()


TERMINATED = """
import os, signal
from cluster.cli.main import main
from cluster.simulate.world.event_log import SimulationLog

note, left = SimulationLog.note, [20]

def note_and_end(event_log, told, subject, **facts):
    note(event_log, told, subject, **facts)
    left[0] -= told.startswith("asked")
    if not left[0]:
        os.kill(os.getpid(), signal.SIGTERM)

SimulationLog.note = note_and_end
main()
"""


@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "background job"])
def test_sigterm_is_as_ctrl_c_but_for_the_exit_code(tmp_path: Path, sigint: signal.Handlers) -> None:
    log = tmp_path / "cut.log"
    changes = [word for change in SMALL for word in ("--set", change)]
    ended = subprocess.run(
        [sys.executable, "-c", TERMINATED, "simulate", *changes, "--events", str(log)],
        capture_output=True, text=True, check=False, preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
    )  # fmt: skip
    assert ended.returncode == 143, ended.stderr
    assert ended.stderr.startswith("interrupted at ")
    assert sum(" asked " in line for line in log.read_text().splitlines()) == 20
