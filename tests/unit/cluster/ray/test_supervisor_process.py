"""Messages of the supervisor's process to its parent. Nothing here starts Ray."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from cluster.config.cluster_config import ClusterConfig, RayConfig
from cluster.process.channel import MessageChannel
from cluster.ray.ray_session import Machines
from cluster.ray.supervisor_messages import SUPERVISOR_MESSAGES, Begin, Resize, Resized
from cluster.ray.supervisor_process import ParentLog, SupervisorProcess
from protos.values import WorkerRole
from router.router_config import RouterConfig
from workers.worker_config import WorkerConfig


async def test_a_line_that_utf_8_cannot_encode_reaches_the_parent() -> None:
    """The name of a file may be such. The line was lost."""
    ours, theirs = socket.socketpair()
    supervisor, parent = (
        await MessageChannel.over(ours, SUPERVISOR_MESSAGES),
        await MessageChannel.over(theirs, SUPERVISOR_MESSAGES),
    )
    log = ParentLog(supervisor)
    for message in ("\udcff is read", "done"):
        record = logging.LogRecord("baton", logging.INFO, __file__, 1, message, None, None)
        record.worker = "decode-\udcff"
        log.handle(record)
    async with asyncio.timeout(60):
        lines = [await parent.receive(), await parent.receive()]
    assert [line.message for line in lines] == [r"\udcff is read", "done"]
    assert lines[0].fields == {"worker": r"decode-\udcff"}
    await supervisor.close()
    await parent.close()


async def test_a_new_size_without_ray_is_refused_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A supervisor that was connecting to Ray answered with an internal error, and a stack trace in the log."""

    async def start(self: Machines) -> None:
        await asyncio.Event().wait()  # Ray's head is away

    monkeypatch.setattr(Machines, "start", start)
    ours, theirs = socket.socketpair()
    supervisor, parent = (
        await MessageChannel.over(ours, SUPERVISOR_MESSAGES),
        await MessageChannel.over(theirs, SUPERVISOR_MESSAGES),
    )
    router = RouterConfig(model_path=Path("m"), model_name="m")
    config = ClusterConfig(worker=WorkerConfig(model="m"), router=router, ray=RayConfig(address="ray://head:10001"))
    begin = Begin(config=config, folder=str(tmp_path), lock="", is_planned=True)  # the fleet is asleep
    running = asyncio.create_task(SupervisorProcess(begin, supervisor).run())
    parent.send(Resize(number=1, counts={WorkerRole.COLOCATED: 1}))
    async with asyncio.timeout(60):
        while not isinstance(resized := await parent.receive(), Resized):
            pass
    assert resized.error is not None
    assert (resized.error.code, resized.error.message) == ("unavailable", "Ray is not there: try again later")
    await parent.close()
    await running
    await supervisor.close()
