"""The last worker dies in mid answer: the answer waits for the worker that its supervisor is starting, however long
that takes to load, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from protos.errors import BatonError, WorkerLost
from protos.values import WorkerRole
from router.fleet.member import WorkerState
from router.fleet.successors import Successor
from router.jobs import TokenDelta
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import expected_tokens

LOADING = Successor(role=WorkerRole.COLOCATED, loaded=0.3)


class Answer:
    """The answer of the only worker, which dies after two tokens of eight. Only a successor may be waited for."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.seen: list[TokenDelta] = []
        self.deltas = cluster.generate(job())
        self.rest: asyncio.Task[list[int]]

    @classmethod
    async def begun(cls, cluster: Cluster) -> Answer:
        answer = cls(cluster)
        await cluster.add("c0")
        cluster["c0"].pause_after = 2
        answer.seen = [await anext(answer.deltas), await anext(answer.deltas)]
        cluster["c0"].pause_after = None
        answer.rest = asyncio.create_task(answer._rest())
        return answer

    async def _rest(self) -> list[int]:
        self.seen += [delta async for delta in self.deltas]
        return tokens(self.seen)

    async def loses_its_worker(self) -> None:
        await self.cluster["c0"].die()
        await self.cluster.until_state("c0", WorkerState.LOST)


async def test_a_running_answer_waits_for_a_starting_worker(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=0.0)
    answer = await Answer.begun(cluster)
    cluster.fleet.starting("c0", Successor(role=WorkerRole.COLOCATED))
    await answer.loses_its_worker()
    cluster.fleet.starting("c0", LOADING)
    with pytest.raises(BatonError, match=r"no worker is ready: c0 is starting \(30% of its weights read\)"):
        await collect(cluster, job("a new one"))
    assert not answer.rest.done()
    [away] = cluster.fleet.status()
    assert away.reason.endswith("; its successor is starting, 30% of its weights read")
    await cluster["c0"].restart()
    cluster.fleet.add_worker(cluster["c0"].address, worker_id="c0")
    assert await answer.rest == expected_tokens(PROMPT, 8)
    assert not len(cluster.fleet.successors)
    assert [worker.reason for worker in cluster.fleet.status()] == [""]


async def test_an_answer_waits_from_the_announcement_to_the_connection(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=0.0)
    answer = await Answer.begun(cluster)
    cluster.fleet.starting("c0", LOADING)
    await answer.loses_its_worker()
    cluster.fleet.add_worker("127.0.0.1:1", worker_id="c0")  # nothing answers there yet
    await cluster.until(lambda: cluster.state("c0") is WorkerState.LOST)
    assert not answer.rest.done()
    await cluster["c0"].restart()
    cluster.fleet.add_worker(cluster["c0"].address, worker_id="c0")
    assert await answer.rest == expected_tokens(PROMPT, 8)


async def test_an_answer_ends_when_its_successor_is_withdrawn(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=0.0)
    answer = await Answer.begun(cluster)
    cluster.fleet.starting("c0", LOADING)
    await answer.loses_its_worker()
    assert not answer.rest.done()
    cluster.fleet.starting("c0", None)
    with pytest.raises(BatonError, match=r"no worker is ready|it hung up"):  # the latter before its first wait
        await answer.rest


async def test_an_answer_waits_for_successor_s_and_no_longer(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=0.0, successor_timeout_s=0.0)
    answer = await Answer.begun(cluster)
    cluster.fleet.starting("c0", LOADING)
    await cluster["c0"].die()
    with pytest.raises(WorkerLost):
        await answer.rest
