"""The states of a worker's ranks become one: which rank counts, and which of several reasons is given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.cluster_config import ClusterConfig
from cluster.ray.hosts import WorkerPlace
from cluster.ray.launcher import RankLauncher, merged
from cluster.supervision.living import LivingWorker
from cluster.supervision.rank import Ended, Event, Loading, Logged, RankSpec
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import BadCheckpoint, BatonError, WorkerLost
from protos.values import WorkerRole
from protos.wire import error_info
from router.router_config import RouterConfig
from workers.worker_config import WorkerConfig

CONFIG = ClusterConfig(worker=WorkerConfig(model="m"), router=RouterConfig(model_path=Path("m"), model_name="m"))
PLAN = WorkerPlan(
    worker_id="decode-0", role=WorkerRole.DECODE, device="cpu", num_ranks=1, cpus_per_rank=0.5, gpus_per_rank=0,
    num_threads=1,
)  # fmt: skip
ENDED = Ended()


class Rank:
    """A link to a rank."""

    def __init__(self, *told: Sequence[Event] | Exception) -> None:
        self._told = list(told)

    async def news(self) -> Sequence[Event]:
        if not self._told:
            await asyncio.Event().wait()
        told = self._told.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    async def stop(self) -> None:
        """It has ended."""

    async def close(self) -> None:
        """It has ended."""


def broke(error: BatonError) -> Ended:
    return Ended(error=error_info(error))


async def heard(*ranks: Rank) -> list[Event]:
    async with aclosing(merged("decode-0", ranks)) as events:
        return [event async for event in events]


async def test_rank_0_speaks_for_the_worker_and_all_may_log() -> None:
    first = Rank([Loading(share=0.5)], [Loading(share=1.0)], [ENDED])
    second = Rank([Loading(share=0.1), Logged(level=logging.WARNING, message="low memory")], [ENDED])
    assert set(await heard(first, second)) == {
        Loading(share=0.5), Loading(share=1.0), Logged(level=logging.WARNING, message="low memory"),
    }  # fmt: skip


async def test_a_follower_that_ends_in_order_does_not_end_the_worker() -> None:
    async with aclosing(merged("decode-0", [Rank([Loading(share=0.5)]), Rank([ENDED])])) as events:
        assert await anext(events) == Loading(share=0.5)
        more = asyncio.ensure_future(anext(events))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not more.done()
        more.cancel()
        await asyncio.wait([more])


async def test_a_dead_process_is_named_by_its_rank() -> None:
    with pytest.raises(WorkerLost) as lost:
        await heard(Rank(), Rank(WorkerLost("its process is gone: it was ended by signal 9")))
    assert lost.value.message == "the process of rank 1 of decode-0 is gone: it was ended by signal 9"


async def test_the_process_of_a_single_rank_is_the_worker_s() -> None:
    with pytest.raises(WorkerLost, match=r"^its process is gone$"):
        await heard(Rank(WorkerLost("its process is gone")))


async def test_wrong_settings_are_reported_before_lost_ranks() -> None:
    left = WorkerLost("rank 0 of 2 lost its tensor-parallel group")
    reason = BadCheckpoint("rank 1 cannot read the weights")
    with pytest.raises(BadCheckpoint, match="cannot read the weights"):
        await heard(Rank([broke(left)]), Rank([broke(reason)]))


class OneHost:
    """A machine whose ranks never end by themselves."""

    address = ""

    def __init__(self, link: Any) -> None:
        self._link = link

    async def meeting_place(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
        return 1

    async def order(self, name: str, pid: int, orders: RankSpec) -> Any:
        return self._link

    async def attach(self, name: str, pid: int) -> Any:
        return self._link

    async def end(self, name: str, pid: int) -> None:
        """It has ended."""


class OnePlace:
    trouble = ""

    def __init__(self, *hosts: OneHost) -> None:
        self._hosts = hosts * 2 if len(hosts) == 1 else hosts
        self.given_back = asyncio.Event()

    async def take(self, plan: WorkerPlan) -> WorkerPlace:
        return WorkerPlace(hosts=self._hosts[: plan.num_ranks])

    async def retake(self, plan: WorkerPlan, living: LivingWorker) -> WorkerPlace:
        return WorkerPlace(hosts=self._hosts[: plan.num_ranks])

    async def give_back(self, plan: WorkerPlan) -> None:
        self.given_back.set()

    async def release(self, worker_id: str) -> None:
        """It has no share of a machine."""


async def test_a_worker_is_killed_even_if_its_stop_was_interrupted() -> None:
    killed, stopping, following = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Stuck(Rank):
        async def stop(self) -> None:
            stopping.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            killed.set()

    places = OnePlace(OneHost(Stuck([Loading(share=0.0)])))
    launcher = RankLauncher(CONFIG, places, lambda living: None)

    async def follow() -> None:
        async with aclosing(launcher.launch(PLAN, 1)) as events:
            async for _ in events:
                following.set()

    task = asyncio.create_task(follow())
    await following.wait()
    task.cancel()
    await stopping.wait()
    task.cancel()
    await asyncio.wait([task])
    assert killed.is_set()
    assert places.given_back.is_set()


async def test_a_worker_is_recorded_before_and_after_its_process_starts() -> None:
    """A supervisor that ends in between leaves no unknown process."""
    recorded: list[LivingWorker] = []
    started: list[int] = []

    class Host(OneHost):
        async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
            started.append(len(recorded))
            return 7

    places = OnePlace(Host(Rank([Loading(share=0.0)], [ENDED])))
    launcher = RankLauncher(CONFIG, places, recorded.append)
    async with aclosing(launcher.launch(PLAN, 3)) as events:
        assert [event async for event in events] == [Loading(share=0.0)]
    assert started == [1]
    assert [living.pids for living in recorded] == [(), (7,)]
    assert {living.names for living in recorded} == {("decode-0.3.0",)}


@pytest.mark.parametrize("fails", ["start", "order"])
async def test_a_rank_that_does_not_come_up_takes_the_others_with_it(fails: str) -> None:
    closed: list[str] = []
    ended: list[tuple[str, int]] = []

    class Closing(Rank):
        async def close(self) -> None:
            closed.append("rank 0")

    class Host(OneHost):
        async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
            if leader and fails == "start":
                raise WorkerLost("no room")
            return 8 if leader else 7

        async def order(self, name: str, pid: int, orders: RankSpec) -> Any:
            if pid == 8:
                raise WorkerLost("no room")
            return self._link

        async def end(self, name: str, pid: int) -> None:
            ended.append((name, pid))

    launcher = RankLauncher(CONFIG, OnePlace(Host(Closing())), lambda living: None)
    with pytest.raises(WorkerLost, match="no room"):
        async with aclosing(launcher.launch(replace(PLAN, num_ranks=2), 3)) as events:
            await anext(events)
    both = [("decode-0.3.0", 7), ("decode-0.3.1", 0)]
    assert (closed, ended) == (([], both) if fails == "start" else (["rank 0"], [("decode-0.3.1", 8)]))


@pytest.mark.parametrize("machines", [("n1", "n1"), ("n1", "n2")])
async def test_ranks_on_two_machines_meet_over_the_network(machines: tuple[str, str]) -> None:
    started: list[tuple[str, str]] = []
    specs: list[RankSpec] = []

    class Host(OneHost):
        def __init__(self, address: str) -> None:
            super().__init__(Rank([Loading(share=0.5)]))
            self.address = address

        async def meeting_place(self) -> tuple[str, int]:
            return self.address, 1

        async def start(self, name: str, environment: Mapping[str, str], leader: str) -> int:
            started.append((self.address, leader))
            return 1

        async def order(self, name: str, pid: int, orders: RankSpec) -> Any:
            specs.append(orders)
            return self._link

    recorded: list[LivingWorker] = []
    launcher = RankLauncher(CONFIG, OnePlace(*map(Host, machines)), recorded.append)
    async with aclosing(launcher.launch(replace(PLAN, num_ranks=2), 3)) as events:
        await anext(events)
    apart = machines[0] != machines[1]
    assert recorded[-1].hosts == machines
    assert started == [(machines[0], ""), (machines[1], "" if apart else "decode-0.3.0")]
    assert [spec.rank_id.store_host for spec in specs] == [machines[0]] * 2
    assert [spec.rank_id.group_host for spec in specs] == (list(machines) if apart else ["127.0.0.1"] * 2)
