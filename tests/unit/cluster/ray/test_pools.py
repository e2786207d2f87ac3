"""The parent of the supervisor: what it makes of a supervisor that ends. A small program stands in for it: no Ray."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config.cluster_config import ClusterConfig
from cluster.ray import pools
from cluster.ray.pools import Pools
from cluster.ray.ray_session import short_folder
from cluster.supervision.living import LivingFleet
from cluster.supervision.start_progress import Bars
from protos.errors import Unavailable
from router.router_config import RouterConfig
from workers.worker_config import WorkerConfig

CONFIG = ClusterConfig(worker=WorkerConfig(model="m"), router=RouterConfig(model_path=Path("m"), model_name="m"))
NEVER_UP = """
import asyncio, os, socket, sys
from cluster.process.channel import MessageChannel
from cluster.ray.supervisor_messages import SUPERVISOR_MESSAGES, RayAway

async def main():
    channel = await MessageChannel.over(socket.socket(fileno=int(sys.argv[1])), SUPERVISOR_MESSAGES)
    await channel.receive()
    channel.send(RayAway(reason="Ray did not start: timed out"))
    await channel.close()
    os._exit(75)

asyncio.run(main())
"""
# Plans and records a worker, and ends; the next one writes down what it was given, and lives on.
ONCE = """
import asyncio, json, os, signal, socket, sys
from cluster.process.channel import MessageChannel
from cluster.supervision.living import LivingWorker
from cluster.supervision.worker_placement import NodeResources, plan
from cluster.ray.supervisor_messages import SUPERVISOR_MESSAGES, LogLine, Planned, RayAway, WorkerRecorded

async def main():
    channel = await MessageChannel.over(socket.socket(fileno=int(sys.argv[1])), SUPERVISOR_MESSAGES)
    begin = await channel.receive()
    if not begin.plans:
        channel.send(Planned(plans=plan(begin.config.pools, (NodeResources(cpus=2.0),), tp=1, device="cpu")))
        channel.send(WorkerRecorded(living=LivingWorker(
            worker_id="decode-0", incarnation=7, hosts=("n1",), devices=("3",), names=("decode-0.7.0",), pids=(9,)
        )))
        await channel.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    given = {"plans": len(begin.plans), "living": begin.living[0].worker_id, "devices": begin.living[0].devices}
    channel.send(LogLine(name="baton.test", level=30, message=json.dumps(given), fields={"worker": "decode-0"}))
    channel.send(RayAway(reason=""))
    await channel.receive()

asyncio.run(main())
"""
# Plans, or says that Ray is there; answers a ping only when the parent has sent it twenty.
DEAF = """
import asyncio, os, socket, sys
from cluster.process.channel import MessageChannel
from cluster.supervision.worker_placement import NodeResources, plan
from cluster.process.channel import Ping, Pong
from cluster.ray.supervisor_messages import SUPERVISOR_MESSAGES, Planned, RayAway

async def main():
    channel = await MessageChannel.over(socket.socket(fileno=int(sys.argv[1])), SUPERVISOR_MESSAGES)
    begin = await channel.receive()
    if begin.plans:
        channel.send(RayAway(reason=""))
    else:
        channel.send(Planned(plans=plan(begin.config.pools, (NodeResources(cpus=2.0),), tp=1, device="cpu")))
    num_pings = 0
    while (message := await channel.receive()) is not None:
        num_pings += isinstance(message, Ping)
        if num_pings > 20:
            channel.send(Pong())

asyncio.run(main())
"""
# Plans, and has two more messages when it is stopped.
TROUBLED = """
import asyncio, os, socket, sys
from cluster.process.channel import MessageChannel
from cluster.supervision.worker_placement import NodeResources, plan
from cluster.ray.supervisor_messages import SUPERVISOR_MESSAGES, Planned, RayAway, StopWorkers

async def main():
    channel = await MessageChannel.over(socket.socket(fileno=int(sys.argv[1])), SUPERVISOR_MESSAGES)
    begin = await channel.receive()
    channel.send(Planned(plans=plan(begin.config.pools, (NodeResources(cpus=2.0),), tp=1, device="cpu")))
    while not isinstance(await channel.receive(), StopWorkers):
        pass
    channel.send(RayAway(reason="Ray is lost"))
    channel.send(RayAway(reason=""))
    await channel.close()

asyncio.run(main())
"""


class Told:
    """An announcer: what is wrong, in order."""

    def __init__(self) -> None:
        self.degraded: list[str] = []
        self.over = asyncio.Event()

    async def starting(self, *_: object) -> None: ...

    async def announce(self, *_: object) -> None: ...

    async def withdraw(self, *_: object) -> None: ...

    async def close(self) -> None: ...

    async def set_degraded(self, reason: str) -> None:
        self.degraded.append(reason)
        if not reason:
            self.over.set()


@pytest.fixture
async def parent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pools]:
    monkeypatch.setattr(pools, "adopt_orphans", lambda: False)  # it concerns the whole process
    made = Pools(CONFIG, Bars(Console(force_terminal=False)))
    yield made
    await made.end()


async def test_a_ray_that_does_not_start_is_tried_three_times(
    parent: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "PROGRAM", NEVER_UP)
    with pytest.raises(Unavailable, match="Ray did not start: timed out; tried 3 times"):
        await parent.prepare()
    tries = [line for line in caplog.messages if "tried again" in line]
    assert [line.partition("(")[2][:6] for line in tries] == ["2 of 3", "3 of 3"]


async def test_the_next_supervisor_is_given_the_workers_that_live(
    parent: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "PROGRAM", ONCE)
    told = Told()
    preparing = asyncio.create_task(parent.prepare())
    await preparing
    await parent.start(told)
    async with asyncio.timeout(60):
        await told.over.wait()
    [record] = [record for record in caplog.records if record.name == "baton.test"]
    assert json.loads(record.getMessage()) == {"plans": 2, "living": "decode-0", "devices": ["3"]}
    assert (record.levelno, vars(record)["worker"]) == (logging.WARNING, "decode-0")
    assert told.degraded[0].startswith("the supervisor was ended by signal 9 (for 0 s): workers keep serving; ")
    assert told.degraded[-1] == ""


async def test_a_supervisor_that_stands_still_is_named_until_it_answers(
    parent: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROGRAM": DEAF, "PING_S": 0.05, "TICK_S": 0.01, "MAX_UNANSWERED": 1000}.items():
        monkeypatch.setattr(pools, name, value)
    told = Told()
    await parent.prepare()
    await parent.start(told)
    async with asyncio.timeout(60):
        await told.over.wait()
    assert told.degraded[0].startswith("the supervisor has not answered for 0 s: workers keep serving; ")
    assert told.degraded[-1] == ""


async def test_a_supervisor_that_never_answers_is_killed_and_the_next_one_is_started(
    parent: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"PROGRAM": DEAF, "PING_S": 0.05, "MAX_UNANSWERED": 5}.items():
        monkeypatch.setattr(pools, name, value)
    told = Told()
    await parent.prepare()
    await parent.start(told)
    async with asyncio.timeout(60):
        while not told.over.is_set() or not any("was killed" in line for line in told.degraded):
            told.over.clear()
            await told.over.wait()
    killed = "the supervisor was killed: it had not answered for 0.25 s"
    assert any(line.startswith(f"{killed}: the supervisor is started again") for line in caplog.messages)


async def test_a_supervisor_is_read_from_further_after_a_message_that_could_not_be_acted_on(
    parent: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It seemed to hang, and was killed."""

    class Broken(Told):
        async def set_degraded(self, reason: str) -> None:
            await super().set_degraded(reason)
            if reason:
                raise RuntimeError("no room")

    monkeypatch.setattr(pools, "PROGRAM", TROUBLED)
    told = Broken()
    await parent.prepare()
    await parent.start(told)
    await parent.stop()
    assert [reason[:11] for reason in told.degraded] == ["Ray is lost", ""]
    assert any("could not be handled" in line for line in caplog.messages)


async def test_a_supervisor_that_cannot_be_spawned_is_tried_again(
    parent: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without room for a process ended the gateway."""

    async def spawn(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    with pytest.raises(Unavailable, match=r"the supervisor could not be started: .*unavailable; tried 3 times"):
        await parent.prepare()
    assert len([line for line in caplog.messages if "tried again" in line]) == 2


async def test_workers_that_are_left_are_on_record_and_ended_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "PROGRAM", ONCE)
    monkeypatch.setattr(pools, "adopt_orphans", lambda: False)  # it concerns the whole process
    records: list[LivingFleet] = []
    first = Pools(CONFIG, Bars(Console(force_terminal=False)), keep=records.append)
    await first.prepare()
    await first._until(lambda: bool(records and records[-1].living))
    await first.leave()
    await first.end()
    left = records[-1]
    assert [worker.worker_id for worker in left.living] == ["decode-0"]
    folder = short_folder() / left.folder
    assert folder.exists(), "the sockets of the ranks are there"

    second = Pools(CONFIG, Bars(Console(force_terminal=False)), keep=records.append, left=left)
    await second.prepare()
    assert (second.plans, records[-1].living) == (left.plans, left.living)
    await second.end()
    assert (records[-1].living, folder.exists()) == ((), False)
