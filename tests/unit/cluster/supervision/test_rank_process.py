"""A rank's own process: what outlives what, and how its end is noticed. Real processes, without a model."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.process.channel import MessageChannel
from cluster.supervision.rank import Ended, RankSpec
from cluster.supervision.rank_messages import RANK_MESSAGES, AttachRank, RankAttached
from cluster.supervision.rank_process import RankProcess
from cluster.supervision.rank_starter import RankLink, ended, has_ended, kill_process, start_process, why_ended
from protos.errors import Misconfigured, WorkerLost
from protos.values import ErrorInfo, WorkerRole
from workers.worker_config import RankId, WorkerConfig

ORDERS = RankSpec(
    role=WorkerRole.DECODE, worker=WorkerConfig(model="m", bind_cores="off"),
    rank_id=RankId(worker_id="d0", incarnation=1),
)  # fmt: skip
HOLDER = """
import fcntl, sys
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""
PATIENCE_S = 15.0  # less than a process waits for its orders


def start(folder: Path, *, lock: str = "", contact_s: float = 0.0) -> int:
    return start_process(folder, "d0.1.0", os.environ, lock=lock, contact_s=contact_s)


@pytest.fixture
def own_log() -> Iterator[None]:
    """A rank's process relays all that is logged in it, and nothing else uses it."""
    log = logging.getLogger("baton")
    handlers, level = [*log.handlers], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.mark.usefixtures("own_log")
async def test_the_next_supervisor_receives_missed_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that broke while there was no supervisor is not merely gone."""
    opening = asyncio.Event()
    loop, may_fail = asyncio.get_running_loop(), asyncio.Event()

    def open_worker(*_: object) -> None:
        loop.call_soon_threadsafe(opening.set)
        asyncio.run_coroutine_threadsafe(may_fail.wait(), loop).result(60)
        raise Misconfigured("no such model", param="model")

    monkeypatch.setattr("cluster.supervision.rank._open_worker", open_worker)
    process = RankProcess()
    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(process.meet, path):
        first = await MessageChannel.to(path, RANK_MESSAGES)
        first.send(ORDERS)
        assert await first.receive() == RankAttached(pid=os.getpid(), has_orders=True)
        await opening.wait()
        await first.close()
        may_fail.set()
        second = await MessageChannel.to(path, RANK_MESSAGES)
        second.send(AttachRank())
        assert await second.receive() == RankAttached(pid=os.getpid(), has_orders=True)
        while not isinstance(message := await second.receive(), Ended):
            assert message is not None
        assert message.error == ErrorInfo(code="misconfigured", message="no such model", param="model")
        await asyncio.wait_for(process.over.wait(), PATIENCE_S)
        await second.close()


@pytest.mark.usefixtures("own_log")
async def test_a_ranks_log_survives_unencodable_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a file may be such. Nothing was sent to the supervisor after it."""
    monkeypatch.setattr(logging.getLogger("baton"), "propagate", False)  # what pytest captures must be encodable
    log = logging.getLogger("baton.worker")
    monkeypatch.setattr(
        "cluster.supervision.rank._open_worker", lambda *_: log.warning("\udcff is read") or log.warning("done")
    )
    process = RankProcess()
    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(process.meet, path), asyncio.timeout(PATIENCE_S):
        supervisor = await MessageChannel.to(path, RANK_MESSAGES)
        supervisor.send(ORDERS)
        assert isinstance(await supervisor.receive(), RankAttached)
        lines = []
        while not isinstance(message := await supervisor.receive(), Ended):
            lines.append(message.message)
        assert lines[:2] == [r"\udcff is read", "done"]
        await supervisor.close()


async def test_a_rank_ends_with_the_process_that_holds_its_cluster(tmp_path: Path) -> None:
    lock = tmp_path / "owned"
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(lock), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    await holder.stdout.readline()
    pid = start(tmp_path, lock=str(lock))
    assert os.getsid(pid) == pid, "no signal to the group of the process that started it meets it"
    assert not has_ended(pid)
    holder.kill()
    await holder.wait()
    await asyncio.wait_for(ended(pid), PATIENCE_S)


async def test_a_remote_rank_ends_without_contact(tmp_path: Path) -> None:
    await asyncio.wait_for(ended(start(tmp_path, contact_s=0.1)), PATIENCE_S)


async def test_followers_end_with_their_leader(tmp_path: Path) -> None:
    leader = start(tmp_path)
    follower = start_process(tmp_path, "d0.1.1", os.environ, lock=str(tmp_path / "d0.1.0.lock"), contact_s=0.0)
    os.kill(leader, signal.SIGKILL)
    await asyncio.wait_for(ended(follower), PATIENCE_S)


async def test_a_rank_without_orders_is_not_adopted_but_ended(tmp_path: Path) -> None:
    pid = start(tmp_path)
    with pytest.raises(WorkerLost, match="had no spec yet"):
        await RankLink.connect(tmp_path, "d0.1.0", pid, AttachRank(), lambda pid: None)
    await asyncio.wait_for(ended(pid), PATIENCE_S)


async def test_that_a_rank_is_gone_is_known_at_once_with_the_reason(tmp_path: Path) -> None:
    pid = start(tmp_path)
    kill_process(tmp_path, "d0.1.0", pid)
    await asyncio.wait_for(ended(pid), PATIENCE_S)
    with pytest.raises(WorkerLost, match=r"ended by signal 9 \(check dmesg for the out-of-memory killer\)"):
        await RankLink.connect(tmp_path, "d0.1.0", pid, AttachRank(), lambda pid: -9)


def test_another_process_that_has_the_id_now_is_spared(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        kill_process(tmp_path, "d0.1.0", other.pid)
        assert other.poll() is None
        other.kill()


async def test_the_last_line_of_a_process_that_crashed_is_told(tmp_path: Path) -> None:
    (tmp_path / "d0.1.0.err").write_text("warming up\nMemoryError: no room\n")
    told = await why_ended(tmp_path, "d0.1.0", 1, lambda pid: 1)
    assert told == "its process is gone: it ended with exit code 1: MemoryError: no room"


async def test_a_channel_ends_at_unreadable_bytes(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    channel = await MessageChannel.over(ours, RANK_MESSAGES)
    with theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        assert await channel.receive() is None
    await channel.close()


def test_the_lock_of_a_rank_is_its_own(tmp_path: Path) -> None:
    pid = start(tmp_path)
    with (tmp_path / "d0.1.0.lock").open("w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        kill_process(tmp_path, "d0.1.0", pid)
        fcntl.flock(lock, fcntl.LOCK_SH)
