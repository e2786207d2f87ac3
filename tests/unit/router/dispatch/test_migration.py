"""A worker drains: its sequences continue elsewhere, with their KV, and their clients read on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from protos.errors import Overloaded, RequestKillsWorkers
from router.fleet.member import WorkerState
from router.jobs import TokenDelta
from tests.unit.router.fake_cluster import PROMPT, Cluster, job, tokens
from tests.unit.router.fake_worker import FakeWorker, expected_tokens

NUM_TOKENS = 12
EXPECTED = expected_tokens(PROMPT, NUM_TOKENS)


class Client:
    """Reads one answer; the worker that writes it stops after `pause_after` tokens until it is told to continue."""

    def __init__(self, cluster: Cluster, *, pause_after: int = 3, adapter: str = "") -> None:
        self.cluster = cluster
        self.job = replace(job(max_tokens=NUM_TOKENS), adapter=adapter)
        self.deltas: list[TokenDelta] = []
        for worker in cluster.workers.values():
            worker.pause_after = pause_after
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for delta in self.cluster.generate(self.job):
            self.deltas.append(delta)

    async def until(self, condition: Callable[[], bool]) -> None:
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(60):
            while not condition():
                await self.cluster.fleet.offers.wait(until=clock() + 0.01)

    async def paused(self) -> str:
        """The id of the worker that has stopped with the sequence."""
        await self.until(lambda: any(map(_stands, self.cluster.workers.values())))
        return next(worker.worker_id for worker in self.cluster.workers.values() if _stands(worker))

    async def stayed(self) -> None:
        await self.until(lambda: self.cluster.generate.moves.num_stayed > 0)

    async def done(self) -> list[int]:
        async with asyncio.timeout(60):
            await self.reading
        return tokens(self.deltas)


def _stands(worker: FakeWorker) -> bool:
    return any(sequence.num_made == worker.pause_after for sequence in worker.running.values())


def drain(cluster: Cluster, worker_id: str) -> None:
    """Drains the worker, and sends one more token, at which the router looks for another worker."""
    worker = cluster[worker_id]
    worker.drain()
    worker.go(None if worker.pause_after is None else worker.pause_after + 1)


async def moved_from(cluster: Cluster, worker_id: str) -> None:
    drain(cluster, worker_id)
    await cluster[worker_id].until(lambda: bool(cluster[worker_id].moved))


def go(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.go()


async def finish(cluster: Cluster, client: Client) -> None:
    """Every worker continues, and the client has every token once."""
    go(cluster)
    assert await client.done() == EXPECTED


def other(cluster: Cluster, worker_id: str) -> str:
    return next(worker for worker in cluster.workers if worker[0] != "p" and worker != worker_id)


async def paused_in(make: Callable[..., Cluster], *worker_ids: str) -> tuple[Cluster, Client, str, str]:
    """A client with a paused answer, its worker, and another worker."""
    cluster = make()
    await cluster.add(*(worker_ids or ("c0", "c1")))
    client = Client(cluster)
    first = await client.paused()
    return cluster, client, first, other(cluster, first)


@pytest.mark.parametrize("workers", [("p0", "d0", "d1"), ("d0", "d1"), ("c0", "c1")])
async def test_a_moved_sequence_loses_and_doubles_no_token(
    make: Callable[..., Cluster], workers: tuple[str, ...]
) -> None:
    cluster = make(local_prefill_tokens=0)
    await cluster.add(*workers)
    client = Client(cluster)
    first = await client.paused()
    second = other(cluster, first)
    await moved_from(cluster, first)
    await finish(cluster, client)
    assert cluster.generate.moves.num_moved == 1
    assert cluster.generate.num_resumed == 0, "nothing was computed again"
    taken = cluster[second].submitted[-1]
    assert taken.ticket is not None
    assert list(taken.output_ids) == EXPECTED[: len(taken.output_ids)]
    assert len(taken.output_ids) > 3
    assert (
        cluster[second].reserved[-1].prompt_ids == (*PROMPT, *EXPECTED)[: len(cluster[second].reserved[-1].prompt_ids)]
    )
    await client.until(lambda: not any(w.running or w.tickets for w in cluster.workers.values()))


async def test_without_another_worker_it_finishes_in_place(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.dispatch.migration.PAUSE_S", 0.0)
    caplog.set_level("INFO", logger="baton.router")
    cluster = make()
    await cluster.add("c0")
    client = Client(cluster)
    drain(cluster, await client.paused())
    await client.stayed()
    await finish(cluster, client)
    assert cluster.generate.moves.num_moved == 0
    assert cluster.generate.moves.num_stayed > 1
    assert caplog.text.count("stays on c0 for now") == 1, "tried again and again, and said once"


async def test_without_room_elsewhere_it_finishes_in_place(make: Callable[..., Cluster]) -> None:
    cluster, client, first, _ = await paused_in(make)
    cluster[other(cluster, first)].refuse = Overloaded("full")
    drain(cluster, first)
    await client.stayed()
    await finish(cluster, client)
    assert cluster.generate.moves.num_moved == 0


async def test_a_worker_that_cannot_move_it_keeps_it(make: Callable[..., Cluster]) -> None:
    cluster, client, first, second = await paused_in(make)
    cluster[first].clings = True
    await moved_from(cluster, first)
    await cluster[second].until(lambda: bool(cluster[second].aborted))
    assert not cluster[second].tickets
    await finish(cluster, client)
    assert not cluster[second].submitted


async def test_kv_that_is_lost_on_the_way_is_computed_again(make: Callable[..., Cluster]) -> None:
    cluster, client, first, _ = await paused_in(make, "c0", "c1", "c2")
    cluster[first].loses_kv = True
    await moved_from(cluster, first)
    await finish(cluster, client)
    assert cluster.generate.num_resumed == 1


async def test_a_worker_dying_during_a_move_costs_a_pause(make: Callable[..., Cluster]) -> None:
    cluster, client, first, second = await paused_in(make)
    reserving = cluster[second].reserving = asyncio.Event()
    drain(cluster, first)
    await cluster[second].until(lambda: bool(cluster[second].reserved))
    await cluster[first].die()
    reserving.set()
    await finish(cluster, client)
    assert cluster.generate.num_resumed == 1
    await client.until(lambda: not cluster[second].tickets)


async def test_a_client_leaving_during_a_move_leaves_nothing(
    make: Callable[..., Cluster],
) -> None:
    cluster, client, first, second = await paused_in(make)
    reserving = cluster[second].reserving = asyncio.Event()
    drain(cluster, first)
    await cluster[second].until(lambda: bool(cluster[second].reserved))
    client.reading.cancel()
    await asyncio.wait([client.reading])
    reserving.set()
    await cluster[first].until(lambda: not cluster[first].running)
    await cluster[second].until(lambda: bool(cluster[second].aborted) and not cluster[second].tickets)
    assert not cluster[first].moved


async def test_a_sequence_moves_again_when_its_new_worker_drains(make: Callable[..., Cluster]) -> None:
    cluster, client, first, _ = await paused_in(make, "c0", "c1", "c2")
    for worker_id in set(cluster.workers) - {first}:
        cluster[worker_id].pause_after = 2  # of what it makes itself
    await moved_from(cluster, first)
    second = await client.paused()
    assert second != first
    await moved_from(cluster, second)
    await finish(cluster, client)
    assert cluster.generate.moves.num_moved == 2


async def test_tokens_in_the_moving_message_are_kept(make: Callable[..., Cluster]) -> None:
    """A slow reader gets the tokens together with MOVED."""
    cluster, client, first, second = await paused_in(make)
    cluster[first].says_when_moving = 2
    await moved_from(cluster, first)
    await finish(cluster, client)
    assert len(cluster[second].submitted[-1].output_ids) == 3 + 1 + 2


@pytest.mark.parametrize("first_is_gone", [False, True])
async def test_the_death_of_a_new_worker_is_its_own_loss(make: Callable[..., Cluster], first_is_gone: bool) -> None:
    cluster = make(max_worker_crashes=1)
    await cluster.add("c0", "c1", "c2")
    client = Client(cluster)
    first = await client.paused()
    for worker_id in set(cluster.workers) - {first}:
        cluster[worker_id].pause_after = 2  # of what it makes itself
    await moved_from(cluster, first)
    second = await client.paused()
    if first_is_gone:
        await cluster[first].die()
        await cluster.until(lambda: cluster.state(first) is not WorkerState.DRAINING)
    await client.until(lambda: len(client.deltas) >= 3 + 1 + 2)
    await cluster[second].die()
    with pytest.raises(RequestKillsWorkers, match=f"the last of them {second}"):
        await client.done()


async def test_the_sequences_worker_learns_whether_its_client_reads(make: Callable[..., Cluster]) -> None:
    cluster, client, first, second = await paused_in(make)
    client.job.client.unread(True)
    await moved_from(cluster, first)
    for worker in cluster.workers.values():
        worker.go()
    await client.until(lambda: bool(cluster[second].submitted))
    cluster[second].pause_after = 2
    client.job.client.unread(True)
    client.job.client.unread(False)
    await client.until(lambda: len(cluster[second].unread) == 2)
    await finish(cluster, client)
    moved_to = cluster[first].submitted[0].request_id, cluster[second].submitted[0].request_id
    assert cluster[first].unread == [(moved_to[0], True)]
    assert cluster[second].unread == [(moved_to[1], True), (moved_to[1], False)]
    client.job.client.unread(True)  # no worker has it any more
