"""The parent of the process with Ray's library: what it makes of one that ends. A small program stands in for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from cluster.config.cluster_config import RayConfig, SupervisionConfig
from cluster.process.life import spawn
from cluster.ray import driver_process
from cluster.ray.driver_messages import BeginDriver
from cluster.ray.driver_process import DriverProcess
from protos.errors import Unavailable

BEGINNING = """
import asyncio, os, signal, socket, sys
from cluster.process.channel import MessageChannel, Ping, Pong
from cluster.ray.driver_messages import DRIVER_MESSAGES, LogLine, RayAnswer, RayAway, RayCall, RayUp, StopRay

async def main():
    channel = await MessageChannel.over(socket.socket(fileno=int(sys.argv[1])), DRIVER_MESSAGES)
    begin = await channel.receive()
"""
END = "\nasyncio.run(main())\n"
NEVER_UP = f"""{BEGINNING}
    channel.send(RayAway(reason="Ray did not start: timed out"))
    await channel.close()
    os._exit(75)
{END}"""
# Ends at the first call; the next one says that there was a Ray before, and answers.
ONCE = f"""{BEGINNING}
    channel.send(RayUp())
    call = await channel.receive()
    if not begin.was_up:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(LogLine(name="baton.test", level=30, message="again", fields=dict(worker="decode-0")))
    channel.send(RayAnswer(number=call.number, value=["3"]))
    await channel.receive()
{END}"""
# Answers a ping only when the parent has sent it twenty.
DEAF = f"""{BEGINNING}
    channel.send(RayUp())
    num_pings = 0
    while (message := await channel.receive()) is not None:
        num_pings += isinstance(message, Ping)
        if num_pings > 20:
            channel.send(Pong())
{END}"""

# Stands still from its beginning.
MUTE = f"{BEGINNING}\n    os.kill(os.getpid(), signal.SIGSTOP)\n{END}"
# Answers with the messages that it has read.
LISTENING = f"""{BEGINNING}
    channel.send(RayUp())
    read = []
    while (message := await channel.receive()) is not None:
        read.append(type(message).__name__)
        if isinstance(message, RayCall) and message.method == "nodes":
            channel.send(RayAnswer(number=message.number, value=[name for name in read if name != "Ping"]))
{END}"""

STOPPABLE = f"""{BEGINNING}
    while not isinstance(await channel.receive(), StopRay):
        pass
{END}"""


class Parent:
    """A driver's parent, and every trouble that it has shown."""

    def __init__(self, folder: Path) -> None:
        self.num_up = self.num_settled = self.num_ended = 0
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        begin = BeginDriver(config=RayConfig(), folder=str(folder), lock="", orphan_s=1.0)
        self.driver = DriverProcess(begin, SupervisionConfig(), came_up=self._came_up, clean_up=self._clean_up)
        self.running: asyncio.Task[None] | None = None

    async def _came_up(self) -> None:
        self.num_up += 1
        await self.may_settle.wait()
        self.num_settled += 1

    def _clean_up(self) -> None:
        self.num_ended += 1

    def start(self) -> None:
        self.running = asyncio.create_task(self.driver.run())

    async def until(self, holds: Callable[[str], bool]) -> str:
        async with asyncio.timeout(60):
            while not holds(trouble := self.driver.trouble):
                await asyncio.wait([asyncio.ensure_future(self.driver.changed.wait())], timeout=0.01)
        return trouble


@pytest.fixture
async def parent(tmp_path: Path) -> AsyncIterator[Parent]:
    made = Parent(tmp_path)
    yield made
    if made.running is not None:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


async def test_a_ray_that_does_not_start_is_tried_three_times(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_process, "PROGRAM", NEVER_UP)
    with pytest.raises(Unavailable, match="Ray did not start: timed out; tried 3 times"):
        await parent.driver.run()
    tries = [line for line in caplog.messages if "tried again" in line]
    assert [line.partition("(")[2][:6] for line in tries] == ["2 of 3", "3 of 3"]
    assert parent.num_ended == 3


async def test_a_call_fails_with_its_driver_and_the_next_one_answers(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_process, "PROGRAM", ONCE)
    with pytest.raises(Unavailable):
        await parent.driver.call("take", kind=tuple[str, ...], waits=False)
    parent.start()
    with pytest.raises(Unavailable):
        await parent.driver.call("take", kind=tuple[str, ...])
    assert (await parent.until(bool)).startswith("Ray's driver was ended by signal 9 (for 0 s): workers keep serving; ")
    assert await parent.driver.call("take", kind=tuple[str, ...]) == ("3",)
    await parent.until(lambda trouble: not trouble)
    assert parent.num_up == 2
    [record] = [record for record in caplog.records if record.name == "baton.test"]
    assert (record.levelno, vars(record)["worker"]) == (logging.WARNING, "decode-0")


async def test_places_of_a_lost_ray_are_not_reserved_again(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker's was reserved twice."""
    monkeypatch.setattr(driver_process, "PROGRAM", ONCE)
    parent.may_settle.clear()
    parent.start()
    with pytest.raises(Unavailable):
        await parent.driver.call("take", kind=tuple[str, ...])
    assert await parent.driver.call("take", kind=tuple[str, ...]) == ("3",)
    parent.may_settle.set()
    await parent.until(lambda trouble: not trouble)
    assert (parent.num_up, parent.num_settled) == (2, 1)


async def test_calls_that_end_something_are_not_cancelled(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hung read both at once: the rank lived on."""
    monkeypatch.setattr(driver_process, "PROGRAM", LISTENING)
    parent.start()
    await parent.driver.call("nodes", kind=tuple[str, ...])
    calls: Sequence[tuple[Any, ...]] = (
        ("on_node", "n1", "close", ("d0.1.0",)),
        ("give_back", "decode-0"),
        ("on_node", "n1", "news", ()),
    )
    for call in calls:
        calling = asyncio.create_task(parent.driver.call(*call, kind=type(None)))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
    read = await parent.driver.call("nodes", kind=tuple[str, ...])
    assert read == ("RayCall",) * 4 + ("CancelCall", "RayCall")


async def test_a_driver_that_stands_still_is_named_until_it_answers(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROGRAM": DEAF, "PING_S": 0.05, "MAX_UNANSWERED": 1000, "MAX_UNHEARD": 2000}.items():
        monkeypatch.setattr(driver_process, name, value)
    parent.start()
    assert (await parent.until(bool)).startswith("Ray's driver does not answer (for 0 s): workers keep serving; ")
    await parent.until(lambda trouble: not trouble)
    assert parent.num_ended == 0


async def test_a_driver_that_stands_still_before_its_first_answer_is_killed(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROGRAM": MUTE, "PING_S": 0.02, "MAX_UNHEARD": 50}.items():
        monkeypatch.setattr(driver_process, name, value)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await parent.driver.run()
    assert parent.num_ended == driver_process.START_TRIES


async def test_a_silent_driver_is_killed_and_replaced(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"PROGRAM": DEAF, "PING_S": 0.05, "MAX_UNANSWERED": 5, "MAX_UNHEARD": 2000}.items():
        monkeypatch.setattr(driver_process, name, value)
    parent.start()
    await parent.until(lambda trouble: "was killed" in trouble)
    await parent.until(lambda trouble: not trouble)
    assert "Ray's driver was killed: it had not answered for 0.25 s: Ray is started again" in caplog.messages


async def test_one_that_has_not_begun_stops_at_once(parent: Parent) -> None:
    async with asyncio.timeout(60):
        await parent.driver.stop()
        await parent.driver.leave()
        await parent.driver.run()
    assert parent.num_ended == 0


async def test_a_driver_is_told_of_a_stop_while_it_was_spawned(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = []

    async def spawn_and_stop(program: str, errors: IO[bytes]) -> object:
        stops.append(asyncio.create_task(parent.driver.stop()))
        return await spawn(program, errors=errors)

    monkeypatch.setattr(driver_process, "PROGRAM", STOPPABLE)
    monkeypatch.setattr(driver_process, "spawn", spawn_and_stop)
    async with asyncio.timeout(60):
        await parent.driver.run()
        await stops[0]
    assert parent.num_ended == 1


async def test_a_driver_that_cannot_be_spawned_is_tried_again(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without room for a process ended the gateway."""

    async def spawn(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    with pytest.raises(Unavailable, match=r"could not be started: .*unavailable; tried 3 times"):
        await parent.driver.run()
    assert len([line for line in caplog.messages if "tried again" in line]) == 2
