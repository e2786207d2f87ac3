"""A request that kills its workers does not kill them all, and takes nobody down with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from protos.errors import RequestKillsWorkers
from router.dispatch import poison_requests
from router.fleet.circuit_breaker import MAX_FAILURES
from router.jobs import TokenDelta
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import FakeWorker, expected_tokens

POISON = tuple(range(500, 520))


@pytest.fixture
def each_death_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake workers die as soon as they get a request, on different hosts."""
    monkeypatch.setattr(poison_requests, "MOMENT_S", 0.0)


async def dying_of(worker: FakeWorker, prompt_ids: tuple[int, ...]) -> None:
    """Kills the worker, again after each restart, when it gets this prompt."""
    while True:
        await worker.until(
            lambda: any(sequence.request.prompt_ids == prompt_ids for sequence in worker.running.values())
        )
        await worker.die()
        await worker.restart()


@pytest.fixture
async def frail(make: Callable[..., Cluster]) -> Cluster:
    """Four workers that die of POISON."""
    cluster = make(max_attempts=100)
    await cluster.add("c0", "c1", "c2", "c3")
    for worker in cluster.workers.values():
        worker.stuck_on = POISON
    return cluster


@pytest.mark.usefixtures("each_death_counts")
async def test_a_request_that_kills_workers_is_stopped_after_two(frail: Cluster) -> None:
    dying = [asyncio.create_task(dying_of(worker, POISON)) for worker in frail.workers.values()]
    with pytest.raises(RequestKillsWorkers) as refused:
        await collect(frail, job("poison", POISON))
    assert not refused.value.retryable
    assert sum(worker.incarnation - 1 for worker in frail.workers.values()) == 2
    for task in dying:
        task.cancel()


@pytest.mark.usefixtures("each_death_counts")
async def test_requests_beside_a_poison_finish(frail: Cluster) -> None:
    for worker in frail.workers.values():
        worker.pause_after = 2
    beside = [asyncio.create_task(collect(frail, job(f"r{i}", max_tokens=12))) for i in range(8)]
    for worker in frail.workers.values():
        await worker.until(lambda worker=worker: len(worker.running) == 2)  # type: ignore[misc]
    dying = [asyncio.create_task(dying_of(worker, POISON)) for worker in frail.workers.values()]
    with pytest.raises(RequestKillsWorkers):
        await collect(frail, job("poison", POISON))
    for worker in frail.workers.values():
        worker.go()
    for deltas in await asyncio.gather(*beside):
        assert tokens(deltas) == expected_tokens(PROMPT, 12)
    for task in dying:
        task.cancel()


async def test_two_quick_deaths_cost_no_answer(make: Callable[..., Cluster]) -> None:
    """With a `max_attempts` of three, a suspect must not fail."""
    cluster = make()
    await cluster.add("c0")
    [worker] = cluster.workers.values()
    worker.pause_after = 0
    asked = [job(f"r{number}", prompt_ids=tuple(range(number, number + 20))) for number in range(12)]
    answers = [asyncio.create_task(collect(cluster, query)) for query in asked]
    for _ in range(2):
        await worker.until(lambda: len(worker.running) == len(asked))
        await worker.die()
        await worker.restart()
    worker.go()
    for one, deltas in zip(asked, await asyncio.gather(*answers), strict=True):
        assert tokens(deltas) == expected_tokens(one.prompt_ids, 8)


@pytest.mark.usefixtures("each_death_counts")
async def test_the_poison_among_many_is_found_and_others_answered(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    [worker] = cluster.workers.values()
    worker.stuck_on, worker.pause_after = POISON, 0
    asked = [job(f"r{number}", prompt_ids=tuple(range(number, number + 20))) for number in range(15)]
    answers = [asyncio.create_task(collect(cluster, query)) for query in asked]
    poison = asyncio.create_task(collect(cluster, job("poison", POISON)))
    await worker.until(lambda: len(worker.running) == 16)
    worker.go()
    worker.pause_after = None
    dying = asyncio.create_task(dying_of(worker, POISON))
    with pytest.raises(RequestKillsWorkers):
        await poison
    for one, deltas in zip(asked, await asyncio.gather(*answers), strict=True):
        assert tokens(deltas) == expected_tokens(one.prompt_ids, 8)
    assert worker.incarnation - 1 <= 2 + 4
    dying.cancel()


async def test_an_answer_with_progress_survives_any_number_of_deaths(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1")
    workers = list(cluster.workers.values())
    for worker in workers:
        worker.pause_after = 17
    deltas = cluster.generate(job(max_tokens=17 * 7))
    seen: list[TokenDelta] = []
    for death in range(1, 7):
        while len(tokens(seen)) < 17 * death:
            seen.append(await anext(deltas))
        [busy] = [worker for worker in workers if worker.running]
        await busy.die()
        await busy.restart()
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 17 * 7)


async def test_a_worker_that_fails_everything_is_paused(
    make: Callable[..., Cluster],
) -> None:
    cluster = make(max_attempts=100, local_prefill_tokens=0)
    await cluster.add("p0", "p1", "d0")
    failing = cluster["p0"]
    failing.loses_kv = True
    cluster["d0"].loses_kv = False
    for number in range(4 * MAX_FAILURES):
        asked = job(f"r{number}", prompt_ids=tuple(range(number, number + 30)))
        assert tokens(await collect(cluster, asked)) == expected_tokens(asked.prompt_ids, 8)
    assert len(failing.submitted) == MAX_FAILURES
