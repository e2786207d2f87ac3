"""When a router has a prefix pulled, from whom, and what becomes of it when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtransfer.hashing import chain_hashes
from protos.errors import Overloaded, TransferFailed
from protos.values import BlockRemoved, BlockStored, Tier, WorkerLoad
from router.dispatch.prefix_pull import (
    GAIN,
    OVERHEAD_S,
    PrefixHolder,
    PullingWorker,
    best_holder,
    measured_bytes_per_s,
    pull_id,
)
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import BLOCK_SIZE, expected_tokens

BYTES = 100_000.0  # of a token: a model of 8 billion parameters
NEAR = PrefixHolder(worker_id="near", num_tokens=2048, bytes_per_s=10e9)
FAR = PrefixHolder(worker_id="far", num_tokens=2048, bytes_per_s=0.1e9)


READER = PullingWorker(num_cached=0, tokens_per_s=5000.0, bytes_per_token=BYTES)


def chosen(*holders: PrefixHolder, reader: PullingWorker = READER) -> str | None:
    best = best_holder(holders, reader)
    return best.worker_id if best is not None else None


def test_the_quickest_way_to_have_the_most_wins() -> None:
    assert chosen(NEAR, FAR) == "near"
    assert chosen(replace(NEAR, num_tokens=64), replace(FAR, bytes_per_s=5e9)) == "far", "more of it outweighs speed"
    assert chosen() is None


def test_a_slow_lane_or_a_quick_reader_computes() -> None:
    assert chosen(FAR) is None, "2048 tokens: 0.4 s to compute, 2 s to move"
    assert chosen(NEAR, reader=replace(READER, tokens_per_s=500_000.0)) is None
    assert chosen(NEAR, reader=replace(READER, tokens_per_s=0.0)) is None, "nothing is known of it yet"


def test_a_pull_must_gain_more_than_it_costs_to_arrange() -> None:
    fewest = int(GAIN * OVERHEAD_S / (1 / 5000 - GAIN * BYTES / NEAR.bytes_per_s)) + 1
    assert chosen(replace(NEAR, num_tokens=fewest + 1)) == "near"
    assert chosen(replace(NEAR, num_tokens=fewest - 1)) is None
    assert chosen(NEAR, reader=replace(READER, num_cached=2048)) is None


def test_own_host_blocks_are_loaded_unless_the_lane_is_faster() -> None:
    hosting = replace(READER, num_cached=2048, num_on_host=2048, load_s=0.02)
    assert chosen(NEAR, reader=hosting) is None, "0.02 s to load, 0.02 s to move"
    assert chosen(NEAR, reader=replace(hosting, load_s=0.2)) == "near"
    assert chosen(replace(NEAR, num_tokens=1024), reader=replace(hosting, load_s=0.2)) is None, "the rest is computed"
    assert chosen(replace(NEAR, num_tokens=4096), reader=hosting) == "near", "0.4 s to compute what the host lacks"


@pytest.mark.parametrize(("load_s", "num_tokens"), [(0.02, 2048), (0.2, 1024)])
def test_a_holders_host_blocks_are_pulled_if_loading_is_fast(load_s: float, num_tokens: int) -> None:
    """A thousand tokens more: 0.2 s to compute."""
    best = best_holder((replace(NEAR, num_tokens=1024), replace(NEAR, load_s=load_s)), READER)
    assert best is not None
    assert best.num_tokens == num_tokens


def test_a_lanes_speed_is_its_last_measured_one() -> None:
    assert measured_bytes_per_s(WorkerLoad(transfer_bytes=3_000_000, transfer_s=0.5)) == 6e6
    assert measured_bytes_per_s(WorkerLoad()) > 0


# -- the router -------------------------------------------------------------------------------------------------------


async def two_readers(make: Callable[..., Cluster]) -> Cluster:
    """c1 has the prompt cached; the next request goes to c0, which is slow at reading."""
    cluster = make(speculative_prefix_ttl_s=0.0)
    await cluster.add("c1")
    await collect(cluster, job("before"))
    await cluster.add("c0")
    cluster["c0"].load = replace(cluster["c0"].load, prefill_tokens_per_s=100.0)
    cluster["c0"].say()
    await cluster.until(lambda: cluster.fleet.member("c0").load.prefill_tokens_per_s > 0)
    cluster.choose("c0")
    return cluster


async def test_the_reader_is_told_where_its_prefix_comes_from(make: Callable[..., Cluster]) -> None:
    cluster = await two_readers(make)
    assert tokens(await collect(cluster, job("r"))) == expected_tokens(PROMPT, 8)
    num_blocks = (len(PROMPT) - 1) // BLOCK_SIZE
    (reserved,) = cluster["c0"].reserved
    assert reserved.request_id == pull_id("r.1")
    assert reserved.prompt_ids == PROMPT[: num_blocks * BLOCK_SIZE]
    assert reserved.source.worker_id == "c1"
    (shared,) = cluster["c1"].shared
    assert len(shared.hashes) == num_blocks
    pull = cluster["c0"].submitted[-1].pull
    assert pull is not None
    assert pull.ticket_id == shared.ticket.ticket_id
    assert cluster.generate.pulls.failures.total() == 0
    await cluster["c0"].until(lambda: pull_id("r.1") in cluster["c0"].aborted)
    await cluster["c1"].until(lambda: pull_id("r.1") in cluster["c1"].aborted)


async def test_blocks_on_another_workers_host_are_pulled(make: Callable[..., Cluster]) -> None:
    cluster = await two_readers(make)
    hashes = chain_hashes(PROMPT, BLOCK_SIZE)
    on_host = BlockStored(hashes=tuple(hashes[2:]), parent=hashes[1], tier=Tier.HOST)
    cluster.fleet.feed.index.apply("c1", (on_host, BlockRemoved(hashes=tuple(hashes[2:]))))
    await collect(cluster, job("r"))
    (shared,) = cluster["c1"].shared
    assert len(shared.hashes) == (len(PROMPT) - 1) // BLOCK_SIZE


@pytest.mark.parametrize("code", ["overloaded", "evicted", "transfer_failed"])
async def test_a_pull_that_fails_is_counted_and_the_reader_computes(make: Callable[..., Cluster], code: str) -> None:
    cluster = await two_readers(make)
    if code == "overloaded":
        cluster["c0"].refuse = Overloaded("no room")
    elif code == "evicted":
        cluster["c1"].blocks.clear()
    else:
        cluster["c1"].refuse = TransferFailed("the lane is gone")
    assert tokens(await collect(cluster, job("r"))) == expected_tokens(PROMPT, 8)
    assert cluster["c0"].submitted[-1].pull is None
    assert cluster.generate.pulls.failures == {code: 1}


async def test_a_failed_pulls_reservation_is_released_before_prefill(
    make: Callable[..., Cluster],
) -> None:
    cluster = await two_readers(make)
    cluster["c1"].blocks.clear()
    cluster["c0"].pause_after = 0
    asking = asyncio.create_task(collect(cluster, job("r")))
    await cluster["c0"].until(lambda: pull_id("r.1") in cluster["c0"].aborted)
    assert not asking.done()
    cluster["c0"].go()
    assert tokens(await asking) == expected_tokens(PROMPT, 8)


@pytest.mark.parametrize("reader", ["c0", "p0"])
async def test_a_pull_that_fails_is_ended_once(make: Callable[..., Cluster], reader: str) -> None:
    """Each of its two ends notifies both workers of the pull."""
    cluster = await two_readers(make)
    cluster["c1"].blocks.clear()
    if reader == "p0":
        await cluster.add("p0", "d0")
        cluster["p0"].load = replace(cluster["p0"].load, prefill_tokens_per_s=100.0)
        cluster["p0"].say()
        await cluster.until(lambda: cluster.fleet.member("p0").load.prefill_tokens_per_s > 0)
        cluster.choose("d0", prefill="p0")
    await collect(cluster, job("r"))
    assert cluster.generate.pulls.failures == {"evicted": 1}
    for name in (reader, "c1"):
        worker = cluster[name]
        cluster.fleet.member(name).abort("last")  # what was said before has come when this has
        await worker.until(lambda worker=worker: "last" in worker.aborted)  # type: ignore[misc]
        assert worker.aborted.count(pull_id("r.1")) == 1


async def test_a_slow_pull_does_not_cost_the_reservation_behind_it(make: Callable[..., Cluster]) -> None:
    cluster = make(speculative_prefix_ttl_s=0.0, ticket_lease_s=0.1)
    await cluster.add("c1")
    await collect(cluster, job("before"))
    await cluster.add("p0", "d0")
    reader, writer = cluster["p0"], cluster["d0"]
    reader.load = replace(reader.load, prefill_tokens_per_s=100.0)
    reader.say()
    await cluster.until(lambda: cluster.fleet.member("p0").load.prefill_tokens_per_s > 0)
    cluster.choose("d0", prefill="p0")
    reader.reserving = asyncio.Event()
    asking = asyncio.create_task(collect(cluster, job("r")))
    await writer.until(lambda: len(writer.reserved) == 5)
    assert writer.reserved == [writer.reserved[0]] * 5
    assert not reader.submitted
    reader.reserving.set()
    assert tokens(await asking) == expected_tokens(PROMPT, 8)
    assert reader.submitted[-1].pull is not None


async def test_prompt_logprobs_are_never_pulled(make: Callable[..., Cluster]) -> None:
    cluster = await two_readers(make)
    await collect(cluster, job("r", prompt_logprobs=0))
    assert not cluster["c0"].reserved
