"""Whatever dies, the client sees a pause: every token once, in order, with its logprobs."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from protos.errors import BatonError, Internal, NotFinite, Overloaded, TransferFailed, WorkerLost
from protos.values import WorkerRole
from protos.wire import error_info
from router.dispatch.dispatcher import LeaseRenewal
from router.fleet.circuit_breaker import MAX_FAILURES
from router.fleet.member import WorkerState
from router.routing import prefix_aware
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import expected_tokens, logprob


@pytest.fixture
async def two_pairs(make: Callable[..., Cluster]) -> Cluster:
    cluster = make()
    await cluster.add("p0", "p1", "d0", "d1")
    return cluster


async def with_warm_pair(make: Callable[..., Cluster]) -> Cluster:
    """Two pairs, of which p0 and d0 hold the prompt: the policy likes them best."""
    cluster = make(policy="prefix_aware", local_prefill_tokens=0)
    await cluster.add("p0", "d0")
    await collect(cluster, job("first"))
    await cluster.add("p1", "d1")
    return cluster


def renewals() -> set[str]:
    """Tasks that keep a reservation."""
    return {name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("renewals of")}


async def test_decode_dies_in_mid_answer(two_pairs: Cluster) -> None:
    dying, other = two_pairs["d0"], two_pairs["d1"]
    dying.pause_after = 3
    deltas = two_pairs.generate(job(logprobs=0))
    seen = [await anext(deltas) for _ in range(4)]
    await dying.die()
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    assert [entry for delta in seen for entry in delta.logprobs] == [logprob(t) for t in expected_tokens(PROMPT, 8)]
    assert other.reserved[0].prompt_ids == (*PROMPT, *expected_tokens(PROMPT, 4))
    assert other.submitted[0].output_ids == tuple(expected_tokens(PROMPT, 5))
    assert not other.tickets
    assert two_pairs.state("d0") is WorkerState.LOST
    await dying.restart()
    await two_pairs.until_state("d0", WorkerState.READY)


async def test_prefill_dies_before_the_first_token(two_pairs: Cluster) -> None:
    dying = two_pairs["p0"]
    dying.pause_after = 0
    asking = asyncio.create_task(collect(two_pairs, job(prompt_logprobs=0)))
    await dying.until(lambda: len(dying.submitted) == 1)
    await dying.die()
    deltas = await asking
    assert tokens(deltas) == expected_tokens(PROMPT, 8)
    assert [entry for delta in deltas for entry in delta.prompt_logprobs] == [logprob(t) for t in PROMPT[1:]]
    await two_pairs["d0"].until(lambda: not two_pairs["d0"].tickets)
    await dying.restart()


async def test_prefill_dies_with_the_kv_on_its_way(two_pairs: Cluster) -> None:
    dying, writer = two_pairs["p0"], two_pairs["d0"]
    writer.pause_after = 0  # its KV has not arrived
    deltas = two_pairs.generate(job())
    seen = [await anext(deltas)]
    await writer.until(lambda: len(writer.submitted) == 1)
    await dying.die()
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    await writer.until(lambda: "r.1" in writer.aborted)
    await dying.restart()


async def test_kv_that_never_arrives_is_sent_by_another(make: Callable[..., Cluster]) -> None:
    cluster = await with_warm_pair(make)
    cluster["p0"].loses_kv = True
    assert tokens(await collect(cluster, job("again"))) == expected_tokens(PROMPT, 8)
    assert [decision.prefill for decision in cluster.generate.decision("again")] == ["p0", "p1"]
    assert cluster.generate.num_resumed == 1


async def test_the_only_worker_is_waited_for(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    cluster["c0"].pause_after = 2
    deltas = cluster.generate(job())
    seen = [await anext(deltas), await anext(deltas)]
    await cluster["c0"].die()
    cluster["c0"].pause_after = None
    rest = asyncio.ensure_future(anext(deltas))
    await cluster.until_state("c0", WorkerState.LOST)
    await cluster["c0"].restart()
    seen += [await rest, *[delta async for delta in deltas]]
    assert tokens(seen) == expected_tokens(PROMPT, 8)


async def test_a_worker_without_progress_costs_one_attempt(make: Callable[..., Cluster]) -> None:
    cluster = make(health_period_s=0.01, max_attempts=2)
    await cluster.add("c0")
    cluster["c0"].pause_after = 1
    deltas = cluster.generate(job())
    seen = [await anext(deltas)]
    cluster["c0"].healthy = False
    rest = asyncio.ensure_future(anext(deltas))
    await cluster.until_state("c0", WorkerState.LOST)
    cluster["c0"].go()
    cluster["c0"].healthy = True
    seen += [await rest, *[delta async for delta in deltas]]
    assert tokens(seen) == expected_tokens(PROMPT, 8)


async def test_a_reservation_is_renewed_while_its_prompt_waits(make: Callable[..., Cluster]) -> None:
    cluster = make(ticket_lease_s=0.1)
    await cluster.add("p0", "d0")
    reader, writer = cluster["p0"], cluster["d0"]
    reader.pause_after = 0
    asking = asyncio.create_task(collect(cluster, job()))
    await writer.until(lambda: len(writer.reserved) == 5)
    assert writer.reserved == [writer.reserved[0]] * 5
    writer.pause_after = 0  # its KV has not arrived
    reader.go()
    await writer.until(lambda: len(writer.submitted) == 1)
    assert renewals() == set(), "after the first token only KV that comes keeps a ticket"
    writer.go()
    assert tokens(await asking) == expected_tokens(PROMPT, 8)
    assert len(reader.submitted) == 1


async def test_a_reservation_is_released_without_garbage_collection(two_pairs: Cluster) -> None:
    gc.collect()
    gc.disable()  # it holds the prompt: as part of a circle it would stay until its generation is looked at
    try:
        await collect(two_pairs, job())
        await asyncio.sleep(0)  # what was cancelled has ended
        assert not renewals()
        assert not [value for value in gc.get_objects() if type(value) is LeaseRenewal]
    finally:
        gc.enable()


@pytest.mark.parametrize("dies", [False, True])
async def test_a_reservation_that_cannot_be_renewed_is_made_elsewhere(make: Callable[..., Cluster], dies: bool) -> None:
    cluster = make(ticket_lease_s=0.1)
    await cluster.add("p0", "p1", "d0", "d1")
    reader, writer = cluster["p0"], cluster["d0"]
    reader.pause_after = 0
    asking = asyncio.create_task(collect(cluster, job()))
    await reader.until(lambda: len(reader.submitted) == 1)
    if dies:
        await writer.die()
    else:
        writer.refuse = TransferFailed("the ticket has expired")
    assert tokens(await asyncio.wait_for(asking, 60)) == expected_tokens(PROMPT, 8)
    assert [request.request_id for request in cluster["d1"].submitted] == ["r.2"]
    await reader.until(lambda: "r.1" in reader.aborted and not reader.running)
    await writer.until(lambda: dies or not writer.tickets)
    assert renewals() == set()
    if dies:
        await writer.restart()


async def test_the_first_token_does_not_wait_for_a_renewal(make: Callable[..., Cluster]) -> None:
    cluster = make(ticket_lease_s=0.1)
    await cluster.add("p0", "d0")
    reader, writer = cluster["p0"], cluster["d0"]
    reader.pause_after = 0
    asking = asyncio.create_task(collect(cluster, job()))
    await reader.until(lambda: len(reader.submitted) == 1)
    writer.reserving = asyncio.Event()
    seen = len(writer.reserved)
    await writer.until(lambda: len(writer.reserved) > seen)
    reader.go()
    assert tokens(await asking) == expected_tokens(PROMPT, 8)
    writer.reserving.set()
    assert writer.aborted == []
    assert tokens(await collect(cluster, job("next"))) == expected_tokens(PROMPT, 8)
    assert writer.aborted == []


async def test_a_client_that_leaves_the_queue_ends_its_renewals(make: Callable[..., Cluster]) -> None:
    cluster = make(ticket_lease_s=0.1)
    await cluster.add("p0", "d0")
    reader, writer = cluster["p0"], cluster["d0"]
    reader.pause_after = 0
    asking = asyncio.create_task(collect(cluster, job()))
    await writer.until(lambda: len(writer.reserved) == 2)
    assert len(renewals()) == 1
    asking.cancel()
    await writer.until(lambda: "r.1" in writer.aborted)
    await reader.until(lambda: "r.1" in reader.aborted)
    assert renewals() == set()
    assert not writer.tickets


async def test_a_request_that_fails_everywhere_is_given_up(cluster: Cluster) -> None:
    cluster["p0"].loses_kv = True
    with pytest.raises(TransferFailed):
        await collect(cluster, job())
    assert [request.request_id for request in cluster["p0"].submitted] == ["r.1", "r.2", "r.3"]
    await cluster["d0"].until(lambda: not cluster["d0"].tickets and not cluster["d0"].running)


async def test_an_early_internal_error_moves_the_job_and_counts(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1")
    error = error_info(Internal("CUDA out of memory"))
    for number in range(4 * MAX_FAILURES):
        cluster["c0"].failed[f"r{number}.1"] = cluster["c0"].failed[f"r{number}.2"] = error
        asked = job(f"r{number}", prompt_ids=tuple(range(number, number + 30)))
        assert tokens(await collect(cluster, asked)) == expected_tokens(asked.prompt_ids, 8)
    assert len(cluster["c0"].submitted) == MAX_FAILURES, "it gets no more for a while"
    cluster["c1"].failed |= {f"bad.{attempt}": error for attempt in (1, 2, 3)}
    with pytest.raises(Internal):
        await collect(cluster, job("bad"))


async def test_a_model_that_overflows_for_a_request_pauses_no_worker(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1")
    for number in range(4 * MAX_FAILURES):
        for worker in ("c0", "c1"):
            cluster[worker].failed[f"bad{number}.1"] = error_info(NotFinite("the model's numbers are not finite"))
        with pytest.raises(NotFinite):
            await collect(cluster, job(f"bad{number}"))
    assert cluster.fleet.offers.totals[WorkerRole.COLOCATED].num_pauses == 0


async def test_a_worker_that_leaves_hands_its_requests_on(two_pairs: Cluster) -> None:
    two_pairs["d0"].pause_after = 1
    deltas = two_pairs.generate(job())
    seen = [await anext(deltas), await anext(deltas)]
    await two_pairs.fleet.remove_worker("d0")
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    with pytest.raises(WorkerLost):
        await two_pairs.fleet.stats("d0")


async def test_a_draining_worker_finishes_and_gets_nothing_new(two_pairs: Cluster) -> None:
    two_pairs["d0"].pause_after = 1
    deltas = two_pairs.generate(job("old"))
    seen = [await anext(deltas), await anext(deltas)]
    two_pairs["d0"].drain()
    await two_pairs.until_state("d0", WorkerState.DRAINING)
    for i in range(4):
        assert tokens(await collect(two_pairs, job(f"new{i}"))) == expected_tokens(PROMPT, 8)
    two_pairs["d0"].go()
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    assert [request.request_id for request in two_pairs["d0"].submitted] == ["old.1"]


async def test_a_draining_workers_refusal_sends_the_job_elsewhere(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", "c1")
    cluster["c0"].draining = True  # the fleet does not know yet
    assert tokens(await collect(cluster, job())) == expected_tokens(PROMPT, 8)
    assert [len(cluster[name].submitted) for name in ("c0", "c1")] == [1, 1]


LANE_DOWN = TransferFailed("the lane is quarantined", retry_after_s=1.0)


@pytest.mark.parametrize(
    ("refuser", "error", "then"),
    [
        ("d0", Overloaded("no free blocks"), ("p0", "d1")),
        ("d0", LANE_DOWN, ("p0", "d1")),
        ("p0", Overloaded("the queue is full"), ("p1", "d0")),
    ],
)
async def test_a_worker_that_refuses_is_passed_over_and_no_other(
    make: Callable[..., Cluster], refuser: str, error: BatonError, then: tuple[str, str]
) -> None:
    cluster = await with_warm_pair(make)
    if refuser == "d0":
        cluster["d0"].refuse = error
    else:
        cluster["p0"].failed["again.1"] = error_info(error)
    assert tokens(await collect(cluster, job("again"))) == expected_tokens(PROMPT, 8)
    assert [(each.prefill, each.decode) for each in cluster.generate.decision("again")] == [("p0", "d0"), then]


async def test_a_prompt_that_was_not_sent_does_not_count_as_cached(make: Callable[..., Cluster]) -> None:
    """An attempt that was refused has left nothing on the worker it chose to read."""
    cluster = make(policy="prefix_aware", local_prefill_tokens=0)
    await cluster.add("p0", "d0", "d1")
    cluster["d0"].refuse = cluster["d1"].refuse = Overloaded("no free blocks")
    asking = asyncio.create_task(collect(cluster, job("new")))
    await cluster["d1"].until(lambda: len(cluster["d0"].reserved) + len(cluster["d1"].reserved) >= 2)
    cluster["d0"].refuse = cluster["d1"].refuse = None
    assert tokens(await asking) == expected_tokens(PROMPT, 8)
    decisions = cluster.generate.decision("new")
    assert len(decisions) > 1
    uncached = {
        dict(score.terms)["uncached"] for decision in decisions for score in decision.scores if score.worker_id == "p0"
    }
    assert uncached == {len(PROMPT) * prefix_aware.COMPUTING_WEIGHT}


@pytest.mark.parametrize("error", [Overloaded("no free blocks"), LANE_DOWN])
async def test_a_job_waits_for_room_and_for_its_only_lane(make: Callable[..., Cluster], error: BatonError) -> None:
    cluster = make(max_attempts=2, retry_pause_s=0.01)
    await cluster.add("p0", "d0")
    cluster["d0"].refuse = error
    asking = asyncio.create_task(collect(cluster, job()))
    await cluster["d0"].until(lambda: len(cluster["d0"].reserved) >= 4)
    assert not asking.done()
    cluster["d0"].refuse = None
    cluster["d0"].say()
    assert tokens(await asking) == expected_tokens(PROMPT, 8)


async def test_a_full_cluster_refuses_in_the_end_with_advice(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=0.05)
    await cluster.add("p0", "d0")
    cluster["d0"].refuse = Overloaded("no free blocks", retry_after_s=7.0)
    with pytest.raises(Overloaded) as raised:
        await collect(cluster, job())
    assert raised.value.retry_after_s == 7.0
    assert cluster["p0"].submitted == []


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_deaths_leaves_every_answer_whole(make: Callable[..., Cluster], seed: int) -> None:
    cluster = make(max_attempts=100, max_worker_crashes=100, retry_pause_s=0.001)
    await cluster.add("p0", "p1", "d0", "d1")
    chance = random.Random(seed)
    jobs = [
        job(f"r{i}", prompt_ids=tuple(range(i, i + 5 + chance.randrange(20))), max_tokens=chance.randrange(1, 40))
        for i in range(24)
    ]
    answers = [asyncio.create_task(collect(cluster, each)) for each in jobs]
    for _ in range(6):
        worker = cluster[chance.choice(["p0", "p1", "d0", "d1"])]
        said = len(worker.submitted) + chance.randrange(1, 8)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):  # it may have nothing to do any more
                await worker.until(lambda worker=worker, said=said: len(worker.submitted) >= said)  # type: ignore[misc]
        worker.loses_kv = chance.random() < 0.3
        await worker.die()
        await worker.restart()
    for worker in cluster.workers.values():
        worker.loses_kv = False
    for asked, deltas in zip(jobs, await asyncio.gather(*answers), strict=True):
        assert tokens(deltas) == expected_tokens(asked.prompt_ids, asked.sampling.max_tokens)
    for worker in cluster.workers.values():
        await worker.until(lambda worker=worker: not worker.running and not worker.tickets)  # type: ignore[misc]
    assert all(status.num_routed == 0 for status in cluster.fleet.status())


async def test_a_worker_failing_after_a_pause_is_not_flooded(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(retry_pause_s=0.1)
    await cluster.add("c0")
    worker, time = cluster["c0"], asyncio.get_running_loop().time
    paused_until_s = time() + 0.5
    monkeypatch.setattr(cluster.fleet.own_pauses, "is_recent", lambda: time() < paused_until_s)
    worker.failed = dict.fromkeys([f"r.{n}" for n in range(10_000)], error_info(TransferFailed("not now")))
    with pytest.raises(TransferFailed):
        await collect(cluster, job())
    assert len(worker.submitted) < 10
