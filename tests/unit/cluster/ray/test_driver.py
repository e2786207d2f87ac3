"""The process with Ray's library: what it sends its parent. Nothing here starts Ray."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from cluster.config.cluster_config import RayConfig
from cluster.process.channel import MessageChannel, Pong
from cluster.ray.driver import ParentLog, RayDriver
from cluster.ray.driver_messages import DRIVER_MESSAGES, BeginDriver, CancelCall, RayAnswer, RayCall, StopRay
from cluster.ray.ray_session import Machines
from cluster.ray.shares import RayShares
from cluster.supervision.worker_placement import WorkerPlan
from protos.values import WorkerRole


async def ends() -> tuple[MessageChannel, MessageChannel]:
    ours, theirs = socket.socketpair()
    return await MessageChannel.over(ours, DRIVER_MESSAGES), await MessageChannel.over(theirs, DRIVER_MESSAGES)


async def test_a_line_that_utf_8_cannot_encode_reaches_the_parent() -> None:
    """The name of a file may be such. The line was lost."""
    driver, parent = await ends()
    log = ParentLog(driver)
    for message in ("\udcff is read", "done"):
        record = logging.LogRecord("baton", logging.INFO, __file__, 1, message, None, None)
        record.worker = "decode-\udcff"
        log.handle(record)
    async with asyncio.timeout(60):
        lines = [await parent.receive(), await parent.receive()]
    assert [line.message for line in lines] == [r"\udcff is read", "done"]
    assert lines[0].fields == {"worker": r"decode-\udcff"}
    await driver.close()
    await parent.close()


async def test_calls_are_answered_with_values_or_errors_and_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan of a worker arrives as it was sent."""
    taken: list[WorkerPlan] = []
    cancelled = asyncio.Event()

    async def start(self: Machines) -> None: ...

    async def lost(self: Machines, doubt: object) -> str:
        await asyncio.Event().wait()
        return ""

    async def take(self: RayShares, plan: WorkerPlan) -> tuple[str, ...]:
        taken.append(plan)
        if len(taken) == 1:
            return ("3", "0")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ()

    monkeypatch.setattr(Machines, "start", start)
    monkeypatch.setattr(Machines, "lost", lost)
    monkeypatch.setattr(RayShares, "take", take)
    driver, parent = await ends()
    begin = BeginDriver(config=RayConfig(), folder=str(tmp_path), lock="", orphan_s=1.0)
    running = asyncio.create_task(RayDriver(begin, driver).run())
    plan = WorkerPlan(
        worker_id="decode-0", role=WorkerRole.DECODE, device="cuda", num_ranks=2, cpus_per_rank=0.5, gpus_per_rank=1,
        num_threads=1,
    )  # fmt: skip

    async def answer() -> RayAnswer:
        while not isinstance(message := await parent.receive(), RayAnswer):
            pass
        return message

    async with asyncio.timeout(60):
        parent.send(RayCall(number=1, method="take", arguments=(plan,)))
        assert await answer() == RayAnswer(number=1, value={"devices": ["3", "0"], "hosts": []})
        parent.send(RayCall(number=2, method="no_such_call", arguments=()))
        error = (await answer()).error
        assert error is not None
        assert error.code == "unavailable"
        parent.send(RayCall(number=3, method="take", arguments=(plan,)))
        parent.send(CancelCall(number=3))
        parent.send(StopRay())
        assert await running == 0
    assert taken[0] == plan
    await parent.close()
    await driver.close()


async def test_the_parent_hears_of_a_driver_before_ray_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver that hung while Ray was started was never found."""

    async def start(self: Machines) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Machines, "start", start)
    driver, parent = await ends()
    begin = BeginDriver(config=RayConfig(), folder=str(tmp_path), lock="", orphan_s=1.0)
    running = asyncio.create_task(RayDriver(begin, driver).run())
    async with asyncio.timeout(60):
        assert await parent.receive() == Pong()
        parent.send(StopRay())
        assert await running == 0
    await parent.close()
    await driver.close()
