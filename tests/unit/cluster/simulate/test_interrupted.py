"""Ctrl-C in `baton simulate`: what was done is kept, nothing is told that did not happen, and it ends with 130."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import make_app
from cluster.simulate.chronicle import Chronicle

SMALL = ("--requests", "30", "--rate", "10", "--input-len", "50:400", "--output-len", "5:40")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(["simulate"]), ["simulate", *arguments])


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int, kind: str = "") -> None:
    """Ctrl-C when so many events of that kind have been told of."""
    note, left = Chronicle.note, [number]

    def note_and_interrupt(chronicle: Chronicle, told: str, subject: str, **facts: object) -> None:
        note(chronicle, told, subject, **facts)
        if told.startswith(kind):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Chronicle, "note", note_and_interrupt)


def test_the_event_log_ends_where_the_run_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole.log", tmp_path / "cut.log"
    assert call(*SMALL, "--events", str(whole)).exit_code == 0
    interrupt_at(monkeypatch, 20, "asked")
    result = call(*SMALL, "--events", str(cut))
    assert result.exit_code == 130
    lines = cut.read_text().splitlines()
    assert lines == whole.read_text().splitlines()[: len(lines)]
    assert sum(" asked " in line for line in lines) == 20
    (told,) = result.stderr.splitlines()
    assert told == f"interrupted at {float(lines[-1].split()[0]):.2f} s of the load, where {cut} ends"


def test_a_run_that_is_interrupted_before_its_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 1, "worker serves")
    result = call(*SMALL)
    assert result.exit_code == 130
    assert result.stderr == "interrupted before the load began\n"
