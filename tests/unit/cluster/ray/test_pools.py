"""The workers of a serving process: their records, and what is announced of Ray. No Ray and no ranks run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.config.cluster_config import ClusterConfig
from cluster.discovery.members import Announced
from cluster.ray import driver_process, pools
from cluster.ray.pools import Pools
from cluster.ray.ray_session import short_folder
from cluster.supervision.living import LivingFleet, LivingWorker
from cluster.supervision.rank import Event, Loading
from cluster.supervision.start_progress import Bars
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import Unavailable
from protos.values import WorkerRole
from router.router_config import RouterConfig
from workers.worker_config import WorkerConfig

CONFIG = ClusterConfig(worker=WorkerConfig(model="m"), router=RouterConfig(model_path=Path("m"), model_name="m"))
DRIVER = """
import asyncio, socket, sys
from cluster.process.channel import MessageChannel
from cluster.ray.driver_messages import DRIVER_MESSAGES, RayAnswer, RayAway, RayCall, RayUp

async def main():
    channel = await MessageChannel.over(socket.socket(fileno=int(sys.argv[1])), DRIVER_MESSAGES)
    await channel.receive()
    channel.send(RayUp())
    while isinstance(message := await channel.receive(), RayCall):
        if message.method == "nodes":
            channel.send(RayAnswer(number=message.number, value=[{"cpus": 2.0}]))
        else:
            channel.send(RayAway(reason="Ray is lost"))
            channel.send(RayAway(reason=""))

asyncio.run(main())
"""


class StagedLauncher:
    """Workers that are about to start, forever."""

    polite_s: float | None = 1.0

    def __init__(self, config: object, places: object, record: Callable[[LivingWorker], None]) -> None:
        self._record = record

    async def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]:
        self._record(LivingWorker(
            worker_id=plan.worker_id, incarnation=incarnation, hosts=("n1",), devices=("3",),
            names=(f"{plan.worker_id}.{incarnation}.0",), pids=(9,),
        ))  # fmt: skip
        yield Loading(share=0.5)
        await asyncio.Event().wait()

    async def adopt(self, plan: WorkerPlan, living: LivingWorker) -> AsyncGenerator[Event, None]:
        yield Loading(share=0.5)
        await asyncio.Event().wait()

    async def release(self, worker_id: str) -> None: ...


class Announcements:
    """An announcer: what is wrong, in order."""

    def __init__(self) -> None:
        self.degraded: list[str] = []

    async def publish(self, announced: Announced) -> None:
        self.degraded.append(announced.degraded)
        if announced.degraded:
            raise RuntimeError("no room")


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Pools]]:
    monkeypatch.setattr(driver_process, "PROGRAM", DRIVER)
    monkeypatch.setattr(pools, "adopt_orphans", lambda: False)  # it concerns the whole process
    monkeypatch.setattr(pools, "RankLauncher", StagedLauncher)
    made: list[Pools] = []

    def pools_of(**options: Any) -> Pools:
        made.append(Pools(CONFIG, Bars(Console(force_terminal=False)), **options))
        return made[-1]

    yield pools_of
    for one in made:
        await one.end()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - of a process elsewhere
            await asyncio.sleep(0.01)


async def test_an_announcement_that_fails_does_not_keep_the_next_one(
    make: Callable[..., Pools], caplog: pytest.LogCaptureFixture
) -> None:
    """The process seemed to hang, and was killed."""
    workers, announcements = make(), Announcements()
    await workers.prepare()
    await workers.start(announcements.publish)
    workers._driver.doubt("Ray is lost")
    await until(lambda: any(announcements.degraded))
    workers._driver.doubt("")
    await until(lambda: not announcements.degraded[-1])
    assert any(reason.startswith("Ray is lost") for reason in announcements.degraded)


async def test_a_new_size_without_ray_is_refused_until_it_is_back(make: Callable[..., Pools]) -> None:
    """A supervisor that was connecting to Ray answered with an internal error, and a stack trace in the log."""
    workers = make()
    with pytest.raises(Unavailable):
        await workers.begin({WorkerRole.DECODE: 1})
    await workers.prepare()
    await until(lambda: bool(workers.plans))
    workers._driver.doubt("Ray is lost")
    with pytest.raises(Unavailable, match="Ray is lost: try again later"):
        await workers.begin({WorkerRole.PREFILL: 1, WorkerRole.DECODE: 2})
    workers._driver.doubt("")
    reaching = await workers.begin({WorkerRole.PREFILL: 1, WorkerRole.DECODE: 2})
    await until(lambda: len(workers.plans) == 3)
    assert set(workers.roles()) == {"prefill-0", "decode-0", "decode-1"}
    asyncio.ensure_future(reaching).cancel()


async def test_remaining_workers_are_on_record_and_ended_ones_are_not(make: Callable[..., Pools]) -> None:
    records: list[LivingFleet] = []
    first = make(keep=records.append)
    await first.prepare()
    await until(lambda: bool(records) and len(records[-1].living) == 2)
    await first.leave()
    await first.end()
    left = records[-1]
    assert {one.worker_id for one in left.living} == {"prefill-0", "decode-0"}
    folder = short_folder() / left.folder
    assert folder.exists(), "the sockets of the ranks are there"

    second = make(keep=records.append, left=left)
    await second.prepare()
    await until(lambda: len(records[-1].living) == 2)
    assert (second.plans, records[-1].living) == (left.plans, left.living)
    await second.end()
    assert (records[-1].living, folder.exists()) == ((), False)
