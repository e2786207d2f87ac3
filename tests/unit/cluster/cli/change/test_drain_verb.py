"""`baton drain WORKER`: asks the gateway, tells how far it is, and ends when the worker has."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.change import drain_verb as verb
from cluster.cli.main import make_app
from cluster.supervision.rank_starter import end_process, has_ended, start_process
from protos.errors import DeadlineExceeded, Misconfigured, NotFound
from protos.values import WorkerLoad, WorkerRole
from tests.unit.cluster.cli.test_status_verb import info
from tests.unit.router.scripted import Crew, Scripted, Worker, make_gateway, saying, serving

INFO = info("decode-0", WorkerRole.DECODE)
READY = Worker(worker_id="decode-0", info=INFO)
BUSY = Worker(worker_id="decode-0", state="draining", info=INFO, load=WorkerLoad(num_running=2, num_moved=3))
LOST = Worker(worker_id="decode-0", state="lost", reason="it ended its stream", info=INFO)
NEXT = Worker(worker_id="decode-0", info=replace(INFO, incarnation=2))


class Changing(Crew):
    """A fleet of one worker that is in the next state each time it is looked at, and stays in the last."""

    def __init__(self, *states: Worker | None) -> None:
        super().__init__()
        self._states = list(states)

    def status(self) -> tuple[Worker, ...]:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return () if state is None else (state,)

    async def drain(self, worker_id: str) -> int:
        self.drained.append(worker_id)
        return 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.change.drain_verb.PERIOD_S", 0.0)


async def drain(fleet: Crew, *flags: str) -> Result:
    async with serving(make_gateway(Scripted(saying("hi")), fleet=fleet)) as url:
        arguments = ["drain", *flags, "--url", url]
        return await asyncio.to_thread(CliRunner().invoke, make_app(arguments), arguments)


@pytest.mark.parametrize("gone", [LOST, None, NEXT])
async def test_it_waits_for_the_workers_end_and_shows_progress(gone: Worker | None) -> None:
    fleet = Changing(READY, BUSY, BUSY, gone)
    result = await drain(fleet, "decode-0")
    assert result.exit_code == 0, result.output
    assert fleet.drained == ["decode-0"]
    lines = result.stdout.splitlines()
    assert lines == ["decode-0 is draining: 2 running, 0 waiting, 3 moved on", "decode-0 has left"]


@pytest.mark.parametrize(
    ("gone", "flags", "told"),
    [
        (replace(LOST, load=WorkerLoad(num_moved=5)), (), "decode-0 has left: 5 moved on"),
        (replace(LOST, load=WorkerLoad(num_running=2)), (), "decode-0 has left"),  # it said no more
        (replace(LOST, load=WorkerLoad(num_moved=5)), ("--replaced",), "decode-0 has been replaced: 5 moved on"),
    ],
)
async def test_late_migrations_are_reported_at_the_end(gone: Worker, flags: tuple[str, ...], told: str) -> None:
    result = await drain(Changing(READY, BUSY, gone, NEXT), "decode-0", *flags)
    assert result.stdout.splitlines()[-1] == told


async def test_a_rolling_restart_waits_for_the_successor() -> None:
    result = await drain(Changing(READY, BUSY, LOST, None, LOST, NEXT), "decode-0", "--replaced")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "decode-0 has been replaced"


async def test_a_worker_that_does_not_end_in_time_is_an_error() -> None:
    result = await drain(Changing(READY, BUSY), "decode-0", "--timeout", "0")
    assert isinstance(result.exception, DeadlineExceeded)
    assert "2 running" in str(result.exception)


async def test_a_worker_that_is_not_there_is_named() -> None:
    fleet = Crew(READY)
    result = await drain(fleet, "decode-7")
    assert isinstance(result.exception, NotFound)
    assert "decode-7" in str(result.exception)
    assert fleet.drained == []


async def test_every_local_worker_is_drained_without_gateway_or_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two clusters may have the same name."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    pids = [start_process(folder, "decode-0.7.0", os.environ, lock="", contact_s=0.0) for folder in folders]
    follower = start_process(tmp_path, "decode-0.7.1", os.environ, lock="", contact_s=0.0)
    leaders = [pair for pair in verb._leaders() if pair[1] in (*pids, follower)]  # others run on this machine, too
    assert sorted(leaders) == sorted(("decode-0", pid) for pid in pids)
    monkeypatch.setattr(verb, "_leaders", lambda: leaders)
    result = await asyncio.to_thread(CliRunner().invoke, make_app(["drain"]), ["drain", "--here", "--timeout", "60"])
    assert result.exit_code == 0, result.output
    assert "decode-0 has left" in result.stdout.splitlines()
    assert all(map(has_ended, pids))
    assert not has_ended(follower), "it ends with its rank 0"
    end_process(tmp_path, "decode-0.7.1", follower)


@pytest.mark.parametrize("flags", [(), ("decode-0", "--here")])
async def test_a_worker_or_this_machine_is_named(flags: tuple[str, ...]) -> None:
    result = await drain(Crew(READY), *flags)
    assert isinstance(result.exception, Misconfigured)
