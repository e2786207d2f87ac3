"""Jobs through a real dispatcher and real gRPC: where they run, what the client gets, what is left behind: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from protos.errors import InvalidRequest, NoWorkers
from protos.values import FinishReason
from router.routing.decision import SingleWorkerReason
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import BLOCK_SIZE, expected_tokens, logprob, token_at


def left_nothing(cluster: Cluster) -> bool:
    return all(not worker.running and not worker.tickets for worker in cluster.workers.values()) and all(
        status.num_routed == 0 for status in cluster.fleet.status()
    )


async def test_prefill_makes_the_first_token_and_decode_the_rest(cluster: Cluster) -> None:
    deltas = await collect(cluster, job())
    assert tokens(deltas) == expected_tokens(PROMPT, 8)
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + [FinishReason.LENGTH]
    [read], [wrote], [reserved] = cluster["p0"].submitted, cluster["d0"].submitted, cluster["d0"].reserved
    assert read.output_ids == ()
    assert wrote.output_ids == (token_at(PROMPT, 0),)
    assert read.ticket == wrote.ticket
    assert reserved.prompt_ids == PROMPT
    assert reserved.source == cluster["p0"].info().lane
    assert left_nothing(cluster)
    await cluster["p0"].until(lambda: cluster["p0"].aborted == ["r.1"])  # its KV has arrived: it may forget the request
    assert cluster["d0"].aborted == []


@pytest.mark.parametrize("shape", [("c0",), ("d0",)], ids=["colocated", "decode only"])
async def test_one_worker_serves_alone(make: Callable[..., Cluster], shape: tuple[str, ...]) -> None:
    cluster = make()
    await cluster.add(*shape)
    assert tokens(await collect(cluster, job())) == expected_tokens(PROMPT, 8)
    [request] = cluster[shape[0]].submitted
    assert request.ticket is None
    assert left_nothing(cluster)


async def test_first_token_overhead_is_learned_on_idle_workers_only(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, seen = make(), list[bool]()

    def saw(*_: Any, on_idle: bool, **__: Any) -> None:
        seen.append(on_idle)

    def has_seen(num: int) -> bool:
        return len(seen) == num

    monkeypatch.setattr(cluster.fleet.offers.predictor, "saw_first_token", saw)
    await cluster.add("c0")
    cluster["c0"].pause_after = 1
    async with asyncio.TaskGroup() as asking:
        for number in range(3):
            asking.create_task(collect(cluster, job(f"r{number}")))
            await cluster.until(partial(has_seen, number + 1))
        cluster["c0"].go()
    assert seen == [True, False, False]


async def test_many_jobs_share_one_stream(cluster: Cluster) -> None:
    jobs = [job(f"r{i}", prompt_ids=tuple(range(i, i + 20)), max_tokens=1 + i % 9) for i in range(64)]
    answers = await asyncio.gather(*(collect(cluster, each) for each in jobs))
    for asked, deltas in zip(jobs, answers, strict=True):
        assert tokens(deltas) == expected_tokens(asked.prompt_ids, asked.sampling.max_tokens)
    assert len(cluster["p0"].hellos) == len(cluster["d0"].hellos) == 1
    await cluster["d0"].until(lambda: left_nothing(cluster))


@pytest.mark.parametrize("reads_further", [True, False])
async def test_simultaneous_requests_leave_in_one_message(make: Callable[..., Cluster], reads_further: bool) -> None:
    cluster = make()
    await cluster.add("c0", reads_further=reads_further)
    jobs = [job(f"r{i}", prompt_ids=tuple(range(i, i + 20)), max_tokens=2) for i in range(20)]
    answers = await asyncio.gather(*(collect(cluster, each) for each in jobs))
    for asked, deltas in zip(jobs, answers, strict=True):
        assert tokens(deltas) == expected_tokens(asked.prompt_ids, 2)
    assert [request.request_id for request in cluster["c0"].submitted] == [f"r{i}.1" for i in range(20)]
    assert (cluster["c0"].num_messages < 20) is reads_further


async def test_a_first_token_that_ends_the_answer_frees_the_blocks(cluster: Cluster) -> None:
    deltas = await collect(cluster, job(stop_token_ids=(token_at(PROMPT, 0),)))
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [((token_at(PROMPT, 0),), FinishReason.STOP)]
    await cluster["d0"].until(lambda: left_nothing(cluster))
    assert cluster["d0"].aborted == [cluster["d0"].reserved[0].request_id]
    assert cluster["d0"].submitted == []


async def test_the_first_token_does_not_wait_for_decode(cluster: Cluster) -> None:
    cluster["d0"].pause_after = 0
    deltas = cluster.generate(job())
    assert (await anext(deltas)).token_ids == (token_at(PROMPT, 0),)
    await cluster["d0"].until(lambda: len(cluster["d0"].submitted) == 1)
    cluster["d0"].go()
    assert tokens([delta async for delta in deltas]) == expected_tokens(PROMPT, 8)[1:]


async def test_a_short_remainder_is_read_where_the_answer_is_written(make: Callable[..., Cluster]) -> None:
    cluster = make(policy="prefix_aware")
    await cluster.add("p0", "d0")
    first = tokens(await collect(cluster, job("turn-1")))
    await cluster.until(lambda: cluster.fleet.status()[1].num_cached_blocks >= len(PROMPT) // BLOCK_SIZE)
    second = (*PROMPT, *first[:2], 7, 8)
    assert tokens(await collect(cluster, job("turn-2", prompt_ids=second))) == expected_tokens(second, 8)
    assert len(cluster["p0"].submitted) == 1
    [decision] = cluster.generate.decision("turn-2")
    assert (decision.prefill, decision.single_worker) == (None, SingleWorkerReason.SHORT_REMAINDER)
    [decision] = cluster.generate.decision("turn-1")
    assert (decision.prefill, decision.decode) == ("p0", "d0")


async def test_decisions_are_kept_in_bounds(make: Callable[..., Cluster]) -> None:
    cluster = make(decision_history_size=2)
    await cluster.add("c0")
    for name in "abc":
        await collect(cluster, job(name))
    assert cluster.generate.decision("a") == ()
    assert len(cluster.generate.decision("c")) == 1


async def test_siblings_go_where_their_prompt_is_computed(make: Callable[..., Cluster]) -> None:
    cluster = make(policy="prefix_aware", local_prefill_tokens=0)
    await cluster.add("p0", "p1", "d0", "d1")
    long = tuple(range(400))
    await asyncio.gather(*(collect(cluster, job(f"r{i}", prompt_ids=long)) for i in range(6)))
    assert sorted(len(cluster[name].submitted) for name in ("p0", "p1")) == [0, 6]
    assert all(cluster[name].submitted for name in ("d0", "d1"))


async def test_cached_tokens_are_those_of_the_prefill_worker(cluster: Cluster) -> None:
    cluster["p0"].cached, cluster["d0"].cached = 12, 24
    deltas = await collect(cluster, job())
    assert [delta.num_cached_tokens for delta in deltas] == [12] + [0] * 7
    totals = {
        role.value: (pool.num_prompt_tokens, pool.num_cached_tokens)
        for role, pool in cluster.fleet.offers.totals.items()
    }
    assert totals == {"prefill": (len(PROMPT), 12), "decode": (0, 0), "colocated": (0, 0)}


async def test_logprobs_come_with_every_token_and_once_for_the_prompt(cluster: Cluster) -> None:
    deltas = await collect(cluster, job(logprobs=0, prompt_logprobs=0))
    assert [entry for delta in deltas for entry in delta.logprobs] == [logprob(t) for t in expected_tokens(PROMPT, 8)]
    assert [entry for delta in deltas for entry in delta.prompt_logprobs] == [logprob(t) for t in PROMPT[1:]]


@pytest.mark.parametrize("num_tokens", [1, 3], ids=["during the transfer", "while decoding"])
async def test_a_client_that_leaves_ends_the_job_on_both_workers(cluster: Cluster, num_tokens: int) -> None:
    cluster["d0"].pause_after = num_tokens - 1
    deltas = cluster.generate(job())
    for _ in range(num_tokens):
        await anext(deltas)
    await deltas.aclose()
    for worker in (cluster["p0"], cluster["d0"]):
        await worker.until(lambda worker=worker: worker.aborted == ["r.1"])  # type: ignore[misc]
    assert left_nothing(cluster)


async def test_a_client_that_leaves_during_prefill_ends_the_job(cluster: Cluster) -> None:
    cluster["p0"].pause_after = 0
    asking = asyncio.create_task(collect(cluster, job()))
    await cluster["p0"].until(lambda: len(cluster["p0"].submitted) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await cluster["p0"].until(lambda: cluster["p0"].aborted == ["r.1"])
    await cluster["d0"].until(lambda: left_nothing(cluster))


async def test_a_client_leaving_during_reserve_leaves_no_reservation(cluster: Cluster) -> None:
    held = cluster["d0"].reserving = asyncio.Event()
    asking = asyncio.create_task(collect(cluster, job()))
    await cluster["d0"].until(lambda: len(cluster["d0"].reserved) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await cluster["d0"].until(lambda: cluster["d0"].aborted == ["r.1"])
    held.set()
    await cluster["d0"].until(lambda: cluster["d0"].aborted == ["r.1", "r.1"])
    assert left_nothing(cluster)
    assert cluster["p0"].submitted == []


async def test_a_mistake_of_the_caller_is_raised_and_not_tried_again(cluster: Cluster) -> None:
    cluster["d0"].refuse = InvalidRequest("token 5000 is not in the vocabulary", param="prompt")
    with pytest.raises(InvalidRequest, match="token 5000") as raised:
        await collect(cluster, job())
    assert raised.value.param == "prompt"
    assert len(cluster["d0"].reserved) == 1


async def test_a_job_waits_for_a_worker_to_join(make: Callable[..., Cluster]) -> None:
    cluster = make()
    asking = asyncio.create_task(collect(cluster, job()))
    await asyncio.sleep(0)
    assert not cluster.fleet.ready()
    await cluster.add("d0")
    assert tokens(await asking) == expected_tokens(PROMPT, 8)


async def test_a_job_that_no_worker_takes_is_refused_with_advice(make: Callable[..., Cluster]) -> None:
    with pytest.raises(NoWorkers) as raised:
        await collect(make(max_queue_s=0.0), job())
    assert raised.value.retry_after_s
