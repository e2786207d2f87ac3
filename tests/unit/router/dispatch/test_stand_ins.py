"""A pool without a ready worker: workers of the other pool do its work, and nobody is refused or notices more than a
pause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.fleet.member import WorkerState
from router.routing.registry import NAMES
from tests.unit.router.dispatch.test_migration import NUM_TOKENS, Client, drain, go
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import expected_tokens


@pytest.mark.parametrize("policy", NAMES)
async def test_prefill_continues_answers_of_the_last_decode_worker(make: Callable[..., Cluster], policy: str) -> None:
    cluster = make(policy=policy, max_queue_s=5.0, local_prefill_tokens=0)
    await cluster.add("p0", "d0")
    cluster["d0"].pause_after = 3
    deltas = cluster.generate(job("running"))
    seen = [await anext(deltas) for _ in range(4)]
    await cluster["d0"].die()
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    assert cluster["p0"].submitted[-1].output_ids == tuple(expected_tokens(PROMPT, 4))
    await cluster.until_state("d0", WorkerState.LOST)
    assert cluster.fleet.ready()
    assert tokens(await collect(cluster, job("new"))) == expected_tokens(PROMPT, 8)
    for request_id in ("running", "new"):
        decision = cluster.generate.decision(request_id)[-1]
        assert (decision.prefill, decision.decode) == (None, "p0")
        assert decision.single_worker == "stands in for the decode pool"


async def test_new_work_returns_to_its_pool_at_once(make: Callable[..., Cluster]) -> None:
    cluster = make(max_queue_s=5.0, local_prefill_tokens=0)
    await cluster.add("p0", "d0")
    await cluster["d0"].die()
    await cluster.until_state("d0", WorkerState.LOST)
    cluster["p0"].pause_after = 2
    deltas = cluster.generate(job("on the stand-in"))
    seen = [await anext(deltas)]
    cluster["p0"].pause_after = None
    cluster["d0"].pause_after = None
    await cluster["d0"].restart()
    await cluster.until_state("d0", WorkerState.READY)
    assert tokens(await collect(cluster, job("new"))) == expected_tokens(PROMPT, 8)
    [decision] = cluster.generate.decision("new")
    assert (decision.prefill, decision.decode, decision.single_worker) == ("p0", "d0", None)
    cluster["p0"].go()
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    assert len(cluster.generate.decision("on the stand-in")) == 1, "it ends where it is"


async def test_a_draining_decode_worker_moves_sequences_to_prefill(
    make: Callable[..., Cluster],
) -> None:
    cluster = make(local_prefill_tokens=0)
    await cluster.add("p0", "d0")
    client = Client(cluster)
    assert await client.paused() == "d0"
    drain(cluster, "d0")
    await client.until(lambda: bool(cluster["d0"].moved))
    go(cluster)
    assert await client.done() == expected_tokens(PROMPT, NUM_TOKENS)
    assert cluster.generate.moves.num_moved == 1
    assert cluster.generate.num_resumed == 0


async def test_a_colocated_worker_is_no_reason_for_prefill_to_stand_in(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("p0", "c0")
    await collect(cluster, job())
    assert not cluster["p0"].submitted
