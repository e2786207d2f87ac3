"""The parity canary: what is run again, that nobody waits for it, and what it says when two answers differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest

from protos.errors import NoWorkers
from protos.values import FinishReason, WorkerRole
from router.dispatch.canary import SALT, Canary, by_one_worker, first_difference
from router.jobs import Job, TokenDelta
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.decision import Decision, RequestView
from tests.unit.router.fake_cluster import PROMPT, Cluster, job, tokens
from tests.unit.router.fake_worker import expected_tokens


class Says:
    """A `Generate` of these tokens that keeps what it was asked for; it waits for `gate` first."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.asked: list[Job] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        self.asked.append(job)
        await self.gate.wait()
        for token_id in self.token_ids[:-1]:
            yield TokenDelta(token_ids=(token_id,))
        yield TokenDelta(token_ids=self.token_ids[-1:], finish_reason=FinishReason.LENGTH)


def canary(usual: Says, alone: Says, every: int = 1) -> Canary:
    return Canary(usual, alone=alone, every=every)


GREEDY = replace(job("r"), sampling=replace(job("r").sampling, temperature=0.0))


async def run(watched: Canary, asked: Job = GREEDY) -> list[int]:
    said = tokens([delta async for delta in watched(asked)])
    await watched.idle()
    return said


@pytest.mark.parametrize(
    ("one", "other", "index"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (4,), 0)]
)
def test_the_first_difference_is_found(one: tuple[int, ...], other: tuple[int, ...], index: int | None) -> None:
    assert first_difference(one, other) == index


async def test_the_same_is_counted_and_a_difference_names_its_position(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    same = canary(Says(1, 2, 3), Says(1, 2, 3))
    assert await run(same) == [1, 2, 3]
    assert same.outcomes == {"same": 1}
    assert not caplog.records
    different = canary(Says(1, 2, 3), Says(1, 9, 3))
    assert await run(different) == [1, 2, 3], "the client gets what it got"
    assert different.outcomes == {"different": 1}
    assert "at token 1 of 3: [2, 3], not [9, 3]" in caplog.text


async def test_one_in_n_greedy_requests_runs_again_uncached() -> None:
    alone = Says(1, 2)
    watched = canary(Says(1, 2), alone, every=3)
    sampled = replace(GREEDY, sampling=replace(GREEDY.sampling, temperature=0.5))
    for asked in (GREEDY, sampled, GREEDY, sampled, GREEDY, GREEDY):
        await run(watched, asked)
    (again,) = alone.asked
    assert again.cache_salt == SALT
    assert again.priority < 0
    assert (again.prompt_ids, again.sampling.max_tokens) == (GREEDY.prompt_ids, GREEDY.sampling.max_tokens)


async def test_off_is_off() -> None:
    alone = Says(1)
    assert await run(canary(Says(1), alone, every=0)) == [1]
    assert not alone.asked


async def test_nobody_waits_for_it_and_there_is_one_at_a_time() -> None:
    alone = Says(1)
    alone.gate.clear()
    watched = canary(Says(1), alone)
    for _ in range(3):
        assert tokens([delta async for delta in watched(GREEDY)]) == [1]
    assert watched.outcomes == {"skipped": 2}
    alone.gate.set()
    await watched.idle()
    assert len(alone.asked) == 1
    assert watched.outcomes == {"skipped": 2, "same": 1}


@pytest.mark.parametrize(
    ("error", "level"), [(NoWorkers("nobody is left"), logging.INFO), (KeyError("left"), logging.ERROR)]
)
async def test_a_second_run_that_fails_is_not_a_difference(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Says):
        async def __call__(self, asked: Job) -> AsyncGenerator[TokenDelta, None]:
            raise error
            yield TokenDelta()

    caplog.set_level(logging.INFO)
    watched = canary(Says(1), Fails())
    await run(watched)
    assert watched.outcomes == {"failed": 1}
    assert [record.levelno for record in caplog.records if "canary" in record.message] == [level]


def test_one_worker_does_all_of_it() -> None:
    def policy(view: RequestView, candidates: CandidateTable) -> Decision:
        assert [candidate.worker_id for candidate in candidates] == ["d0"]
        return Decision(policy="p", prefill="p0", decode="d0")

    pools = (Candidate(worker_id="p0", role=WorkerRole.PREFILL), Candidate(worker_id="d0", role=WorkerRole.DECODE))
    candidates = CandidateTable.of(pools)
    view = RequestView(request_id="r", num_tokens=3, block_size=4)
    assert by_one_worker(policy)(view, candidates).prefill is None


async def test_on_a_cluster_the_second_run_never_leaves_decode(make: Callable[..., Cluster]) -> None:
    cluster = make(local_prefill_tokens=0)
    await cluster.add("p0", "d0")
    watched = Canary(cluster.generate, alone=cluster.alone(), every=1)
    assert await run(watched, replace(GREEDY, prompt_ids=PROMPT)) == expected_tokens(PROMPT, 8)
    assert watched.outcomes == {"same": 1}
    assert [request.request_id for request in cluster["p0"].submitted] == ["r.1"]
    assert [request.request_id for request in cluster["d0"].submitted] == ["r.1", "r-canary.1"]
