"""A prefix that one worker has cached is read by another one without computing it, over real gRPC and real lanes."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.values import SamplingParams
from router.dispatch.dispatcher import Dispatcher
from router.jobs import Job
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, RequestView
from tests.cluster.test_disaggregated import PROMPTS
from tests.cluster.test_draining import Cluster, checkpoint, cluster_of
from tests.unit.router.fake_cluster import dispatcher_with

pytestmark = pytest.mark.cluster

__all__ = ["checkpoint"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = PROMPTS[6]
NUM_FULL = len(PROMPT) // 16 * 16


def reading_at(cluster: Cluster, worker_id: str, prefill: str | None = None) -> Dispatcher:
    """A router that sends everything there."""

    def decide(view: RequestView, candidates: CandidateTable) -> Decision:
        return Decision(policy="chosen", prefill=prefill, decode=worker_id)

    return dispatcher_with(cluster.router, decide)


async def answer(generate: Dispatcher, request_id: str, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were cached."""
    job = Job(request_id=request_id, group_id="g", prompt_ids=prompt, sampling=GREEDY)
    deltas = [delta async for delta in generate(job)]
    return [token for delta in deltas for token in delta.token_ids], sum(delta.num_cached_tokens for delta in deltas)


async def warm_up(generate: Dispatcher) -> None:
    """The first prompt is read cold; from the second on the reader's speed is known."""
    await answer(generate, "cold", tuple(reversed(PROMPT)))
    await answer(generate, "warm", PROMPT[1:])


@pytest.fixture(autouse=True)
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes moving KV free: in so small a model it costs as much as computing, and a busy machine would decide."""
    monkeypatch.setattr("router.dispatch.prefix_pull.OVERHEAD_S", 0.0)
    monkeypatch.setattr("router.dispatch.prefix_pull.GAIN", 0.0)


async def test_a_worker_reads_a_prefix_cached_by_another(checkpoint: Path) -> None:
    async with cluster_of(checkpoint, "colocated-0", "colocated-1") as cluster:
        there, here = reading_at(cluster, "colocated-0"), reading_at(cluster, "colocated-1")
        expected, none_cached = await answer(there, "first")
        await warm_up(here)
        pulled, num_cached = await answer(here, "second")
        assert pulled == expected
        assert (none_cached, num_cached) == (0, NUM_FULL)
        assert here.pulls.num_blocks == NUM_FULL // 16
        assert not here.pulls.failures
        load = (await cluster.fleet.stats("colocated-1")).load
        assert (load.num_pulled_tokens, load.num_failed_pulls) == (NUM_FULL, 0)
        again, num_cached = await answer(here, "third")
        assert (again, num_cached) == (expected, NUM_FULL)
        assert here.pulls.num_blocks == NUM_FULL // 16, "by now it has them itself"


async def test_prefill_reads_the_answer_of_the_last_turn_from_decode(checkpoint: Path) -> None:
    async with cluster_of(checkpoint, "prefill-0", "decode-0") as cluster:
        generate = reading_at(cluster, "decode-0", "prefill-0")
        await warm_up(generate)
        first, _ = await answer(generate, "first")
        turn = (*PROMPT, *first, *PROMPTS[2])
        read, num_cached = await answer(generate, "second", turn)
        assert num_cached == (len(PROMPT) + len(first) - 1) // 16 * 16, "prompt and answer, as far as decode wrote KV"
        assert generate.pulls.num_blocks > 0
        alone, _ = await answer(reading_at(cluster, "decode-0"), "alone", turn)
        assert read == alone
