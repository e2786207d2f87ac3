"""Workers are met, checked, watched, lost and met again; the index follows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from kvtransfer.hashing import chain_hashes
from protos.errors import WorkerLost
from protos.values import (
    DraftCounts,
    Hello,
    HostLoad,
    LaneLoad,
    PausedProposer,
    SequenceUpdate,
    SpeculationLoad,
    StepMessage,
    WorkerLoad,
)
from router import router_metrics
from router.fleet.member import Member, WorkerState
from router.prefix.index import NO_MATCH
from router.router_metrics import Scraped, fleet_metrics
from tests.layouts import changed
from tests.unit.router.fake_cluster import PROMPT, Cluster, collect, job, tokens
from tests.unit.router.fake_worker import BLOCK_SIZE, LANE_KEY, LAYOUT, FakeWorker, expected_tokens

HASHES = chain_hashes(PROMPT, BLOCK_SIZE)


def reason(cluster: Cluster, worker_id: str) -> str:
    return next(status.reason for status in cluster.fleet.status() if status.worker_id == worker_id)


def metrics_of(cluster: Cluster) -> Callable[..., float | None]:
    registry = CollectorRegistry()
    registry.register(Scraped(lambda: fleet_metrics(cluster.fleet)))
    return lambda name, **labels: registry.get_sample_value(f"baton_{name}", labels)


def cached(cluster: Cluster, *worker_ids: str) -> Iterable[int]:
    matched = cluster.fleet.feed.index.match(HASHES, now=float("inf"))
    return [matched.blocks.get(worker_id, 0) for worker_id in worker_ids]


async def test_ready_means_a_request_would_be_served(make: Callable[..., Cluster]) -> None:
    cluster = make()
    assert not cluster.fleet.ready()
    for worker_id in ("p0", "d0"):  # either serves whole requests while the other is away
        await cluster.add(worker_id)
        assert cluster.fleet.ready()
        await cluster.fleet.remove_worker(worker_id)
        assert not cluster.fleet.ready()


async def test_a_worker_is_met_when_it_starts_late(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    address = cluster["c0"].address
    await cluster["c0"].die()
    await cluster.until_state("c0", WorkerState.LOST)
    assert address in reason(cluster, "c0")
    await cluster["c0"].restart()
    await cluster.until_state("c0", WorkerState.READY)


async def test_the_fleet_knows_how_its_workers_keep_weights_and_kv(make: Callable[..., Cluster]) -> None:
    cluster, layout = make(), changed(LAYOUT, dtype="int8")
    await cluster.add("c1", weights="rounded-int8-g128, 8.13 bits a weight", layout=layout)
    alone = cluster.fleet.stored_as("")
    await cluster.add("c0", weights="BF16, 16 bits a weight", layout=layout)
    both = cluster.fleet.stored_as("")
    for worker_id in ("c1", "c0"):
        await cluster.fleet.remove_worker(worker_id)
    assert alone == "rounded-int8-g128, 8.13 bits a weight; KV int8"
    assert both == f"BF16, 16 bits a weight; KV int8, {alone}"
    assert cluster.fleet.stored_as("") == "BF16, 16 bits a weight; KV int8", "the last ones answered"


async def test_how_a_revision_keeps_kv_is_told_apart_while_a_roll_runs(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", weights="BF16", layout=LAYOUT)
    await cluster.add("c1", weights="BF16", layout=changed(LAYOUT, dtype="int8"), revision="new")
    told = [cluster.fleet.stored_as(revision) for revision in ("", "new")]
    await cluster.fleet.remove_worker("c0")
    assert told == [f"BF16; KV {LAYOUT.parts[0].dtype}", "BF16; KV int8"]
    assert cluster.fleet.stored_as("new") == told[1], "no third description, neither during the roll nor after it"


async def test_caches_of_other_block_sizes_are_matched(make: Callable[..., Cluster]) -> None:
    cluster, size = make(), BLOCK_SIZE
    await cluster.add("c0")
    await cluster.add("c1", layout=replace(LAYOUT, block_size=2 * size))
    await cluster.add("c2", layout=replace(LAYOUT, block_size=size // 2))
    for worker_id, num_blocks in (("c0", 1), ("c1", 1), ("c2", 3)):
        chain = chain_hashes(PROMPT, cluster.fleet.member(worker_id).block_size or 0)
        cluster.fleet.feed.index.expect(worker_id, chain[:num_blocks], until=float("inf"))
    matched = cluster.fleet.offers.match(partial(chain_hashes, PROMPT), now=0.0)
    assert matched.blocks == {"c0": 1, "c1": 2, "c2": 1}
    candidates = cluster.fleet.offers.candidates(matched, len(PROMPT))
    assert [candidate.num_cached_tokens for candidate in candidates] == [size, 2 * size, size]
    await collect(cluster, job())
    (used,) = (name for name in ("c0", "c1", "c2") if cluster[name].submitted)
    own = chain_hashes(PROMPT, cluster.fleet.member(used).block_size or 0)
    assert cluster.fleet.feed.index.match(own, now=0.0).blocks[used] == len(own), "siblings are sent after it"


async def test_a_lanes_key_goes_to_the_other_worker_and_is_hidden(
    make: Callable[..., Cluster],
) -> None:
    cluster = make()
    await cluster.add("p0", "d0")
    cluster.choose("d0", prefill="p0")
    await collect(cluster, job())
    assert cluster["d0"].reserved[0].source.key == LANE_KEY
    shown = orjson.dumps(cluster.fleet.status()).decode()
    assert '"lane":{"worker_id":"d0"' in shown
    assert LANE_KEY not in shown


async def test_a_worker_that_does_not_fit_is_named_and_never_used(make: Callable[..., Cluster]) -> None:
    misfits: dict[str, dict[str, Any]] = {
        "block_size": {"layout": replace(LAYOUT, block_size=LAYOUT.block_size + 1)},
        "model": {"model": "another"},
        "num_layers": {"layout": changed(LAYOUT, num_layers=7)},
        "device": {"device": "cuda"},
        "dtype": {"layout": changed(LAYOUT, dtype="float16")},
        "num_kv_heads": {"layout": changed(LAYOUT, num_kv_heads=LAYOUT.num_kv_heads + 1)},
    }
    cluster = make()
    await cluster.add("p0")
    for number, misfit in enumerate(misfits.values()):
        await cluster.add(f"d{number}", wait=False, **misfit)
    for number, field in enumerate(misfits):
        await cluster.until_state(f"d{number}", WorkerState.INCOMPATIBLE)
        assert field in reason(cluster, f"d{number}")
    assert [load.worker_id for load in cluster.fleet.offers.loads()] == ["p0"]
    await cluster.add("d9")
    assert tokens(await collect(cluster, job())) == expected_tokens(PROMPT, 8)


async def test_a_worker_must_fit_all_others(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("p0")
    await cluster.add("d0", layout=replace(LAYOUT, block_size=2 * BLOCK_SIZE))
    await cluster.add("d1", wait=False, layout=replace(LAYOUT, block_size=3 * BLOCK_SIZE))
    await cluster.until_state("d1", WorkerState.INCOMPATIBLE)
    assert "from worker d1 to worker d0: block_size is 12 there and 8 here" in reason(cluster, "d1")


async def test_an_address_that_somebody_else_answers_is_not_trusted(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0", wait=False, worker_id="impostor")
    await cluster.until_state("c0", WorkerState.INCOMPATIBLE)
    assert "answers as impostor" in reason(cluster, "c0")


async def test_a_worker_without_progress_is_lost_although_it_answers(make: Callable[..., Cluster]) -> None:
    cluster = make(health_period_s=0.01)
    await cluster.add("c0", "c1")
    cluster["c0"].pause_after = 1
    deltas = cluster.generate(job())
    seen = [await anext(deltas)]
    cluster["c0"].healthy = False
    seen += [delta async for delta in deltas]
    assert tokens(seen) == expected_tokens(PROMPT, 8)
    await cluster.until_state("c0", WorkerState.LOST)
    assert "no step finished for 60 s" in reason(cluster, "c0")
    cluster["c0"].healthy = True
    await cluster.until_state("c0", WorkerState.READY)


async def test_a_worker_that_was_told_to_leave_is_not_called_lost(
    make: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make()
    await cluster.add("c0")
    await cluster.fleet.drain("c0")
    await cluster.until_state("c0", WorkerState.DRAINING)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="baton.router"):
        await cluster["c0"].die()
        await cluster.until_state("c0", WorkerState.DRAINED)
        with pytest.raises(WorkerLost, match="c0 is already draining"):
            await cluster.fleet.drain("c0")
        member, now = cluster.fleet.member("c0"), asyncio.get_running_loop().time()
        assert not member.enter(WorkerState.LOST, "Connection refused", now=now), "nothing new"
    assert reason(cluster, "c0") == "its successor is due"
    told = [record.getMessage() for record in caplog.records]
    assert sum("has drained and ended" in line for line in told) == 1
    assert not any("is lost" in line for line in told)
    for later_s in (600.0, 900.0):
        member.enter(WorkerState.LOST, "Connection refused", now=now + later_s)
        assert member.state is WorkerState.LOST
        assert member.reason == "it has drained, and no successor has come for 10 minutes"


async def test_that_a_worker_is_lost_is_told_once(
    make: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make()
    await cluster.add("c0")
    with caplog.at_level(logging.INFO, logger="baton.router"):
        await cluster["c0"].die()
        await cluster.until_state("c0", WorkerState.LOST)
        first = reason(cluster, "c0")
        await cluster.until(lambda: reason(cluster, "c0") != first)
    told = [record.getMessage() for record in caplog.records]
    assert sum("c0" in line and "lost" in line for line in told) == 1, told


async def test_why_a_worker_cannot_be_reached_is_told_in_words(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    address = cluster["c0"].address
    await cluster["c0"].die()
    await cluster.until_state("c0", WorkerState.LOST)
    assert reason(cluster, "c0") == f"the worker at {address} cannot be reached: it hung up"
    nobody = f"the worker at {address} cannot be reached: nothing listens there (connection refused)"
    await cluster.until(lambda: reason(cluster, "c0") == nobody)


async def test_a_worker_may_leave_in_the_moment_it_is_lost(make: Callable[..., Cluster]) -> None:
    cluster = make()
    await cluster.add("c0")
    cluster.fleet.member("c0").connection().lose(WorkerLost("no progress"))
    left, _ = await asyncio.wait([asyncio.create_task(cluster.fleet.remove_worker("c0"))], timeout=30)
    assert left
    assert not cluster.fleet.status()


async def test_the_index_follows_workers_events(cluster: Cluster) -> None:
    await collect(cluster, job())
    await cluster.until(lambda: cached(cluster, "p0", "d0") == [7, 7])


async def test_missing_events_are_made_good_by_a_snapshot(cluster: Cluster) -> None:
    cluster["p0"].skips = 1
    await collect(cluster, job("a"))
    cluster["p0"].say()
    await cluster.until(lambda: cached(cluster, "p0") == [7])
    assert cluster["p0"].hellos[1:] == [Hello(gateway_id="g0", incarnation=1, next_seq=0)]


async def test_a_worker_in_a_new_life_has_an_empty_cache(cluster: Cluster) -> None:
    await collect(cluster, job())
    await cluster.until(lambda: cached(cluster, "p0", "d0") == [7, 7])
    await cluster["p0"].die()
    await cluster.until_state("p0", WorkerState.LOST)
    await cluster["p0"].restart()
    await cluster.until_state("p0", WorkerState.READY)
    assert cached(cluster, "p0", "d0") == [0, 7]


async def test_a_worker_that_moved_is_found_at_its_new_address(cluster: Cluster) -> None:
    await cluster["d0"].die()
    moved = FakeWorker("d0", cluster["d0"].role, cluster.workers)
    await moved.start()
    cluster.fleet.add_worker(moved.address, worker_id="d0")
    await cluster.until(lambda: bool(moved.hellos) and cluster.state("d0") is WorkerState.READY)  # not ready as before
    assert tokens(await collect(cluster, job())) == expected_tokens(PROMPT, 8)
    assert len(moved.submitted) == 1


def test_routed_work_counts_until_the_load_shows_it() -> None:
    member = Member("w", "here:1")
    member.apply_step(StepMessage(load=WorkerLoad(step=5)))
    for request_id, num_tokens in (("a", 100), ("b", 10), ("c", 1)):
        member.route(request_id, num_tokens)
    member._submitted("a")
    member._submitted("b")

    def queued(step: StepMessage | None) -> int:
        if step is not None:
            member.apply_step(step)
        return sum(routed.num_tokens for routed in member._routed.values())

    assert queued(None) == 111
    assert queued(StepMessage(load=WorkerLoad(step=6), updates=(SequenceUpdate(request_id="b"),))) == 101
    assert queued(StepMessage(load=WorkerLoad(step=7))) == 1, "c was not sent yet: no load can show it"


async def test_metrics_have_each_lanes_transport_and_reason(cluster: Cluster) -> None:
    far = LaneLoad(transport="gloo", reason="no memory in common", num_open=2, num_opened=5, num_lost=3, num_stuck=1)
    cluster["p0"].load = WorkerLoad(step=1, lanes=(far, LaneLoad(transport="shm", num_open=1, num_opened=1)))
    cluster["p0"].say()
    cluster["p0"].say()  # the same, said again
    await cluster.until(lambda: cluster.fleet.status()[0].load.step == 3)

    value, shm = metrics_of(cluster), {"pool": "prefill", "transport": "shm", "reason": ""}
    gloo = shm | {"transport": "gloo", "reason": "no memory in common"}
    counts = {"lanes": 2, "lanes_opened_total": 5, "lanes_lost_total": 3, "lanes_stuck_total": 1}
    assert {name: value(f"pool_{name}", **gloo) for name in counts} == counts
    assert (value("pool_lanes", **shm), value("pool_lanes_corrupt_total", **shm)) == (1, 0)
    await cluster["p0"].die()
    await cluster.until_state("p0", WorkerState.LOST)
    assert value("pool_lanes", **shm) is None
    assert value("pool_lanes_lost_total", **gloo) == 3


async def test_workers_have_series_of_their_own_up_to_a_bound(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster["d0"].load = WorkerLoad(step=1, num_blocks=100, num_free_blocks=60, num_waiting=2)
    cluster["d0"].say()
    await cluster.until(lambda: cluster.fleet.status()[1].load.num_waiting == 2)

    value = metrics_of(cluster)
    writer, reader = {"worker": "d0", "pool": "decode"}, {"worker": "p0", "pool": "prefill"}
    assert value("worker_kv_blocks_used", **writer) == 40
    assert (value("worker_waiting", **writer), value("worker_ready", **reader)) == (2, 1)
    assert value("worker_unlisted") == 0
    await cluster["d0"].die()
    await cluster.until_state("d0", WorkerState.LOST)
    assert (value("worker_ready", **writer), value("worker_waiting", **writer)) == (0, 0)
    monkeypatch.setattr(router_metrics, "MAX_WORKERS", 1)
    assert value("worker_ready", **reader) is None
    assert value("worker_unlisted") == 1


HOST = HostLoad(num_blocks=50, num_used=20, num_hit_tokens=8, load_s=0.5)


async def test_drafts_are_counted_by_pool_source_and_position(cluster: Cluster) -> None:
    """Drafts of a worker's earlier process count as well."""
    drafts = DraftCounts(source="ngram", drafted_at=(10, 5), accepted_at=(8, 2))
    first = SpeculationLoad(num_rows=20, num_tokens=30, spared_s=2.0, spent_s=0.5, sources=(drafts,))
    paused = PausedProposer(source="eagle", num_steps=2048, spared_s=0.1, spent_s=1.0)
    fewer = (replace(drafts, drafted_at=(1,)),)
    again = SpeculationLoad(num_rows=5, num_tokens=6, spared_s=0.5, sources=fewer, paused=(paused,))
    for load in (first, first, again):
        if load is again:
            await cluster["d0"].die()
            await cluster.until_state("d0", WorkerState.LOST)
            await cluster["d0"].restart()
            await cluster.until_state("d0", WorkerState.READY)
        cluster["d0"].load = WorkerLoad(num_blocks=100, speculation=load)
        cluster["d0"].say()
        await cluster.until(lambda load=load: cluster.fleet.status()[1].load.speculation == load)  # type: ignore[misc]

    value, pool = metrics_of(cluster), {"pool": "decode"}
    totals = {"rows": 25, "tokens": 36, "spared_seconds": 2.5, "spent_seconds": 0.5}
    assert {name: value(f"pool_speculation_{name}_total", **pool) for name in totals} == totals
    assert value("pool_speculation_drafted_total", source="ngram", position="1", **pool) == 11
    assert value("pool_speculation_accepted_total", source="ngram", position="2", **pool) == 4
    assert value("pool_speculation_rows_total", pool="prefill") == 0
    assert value("pool_speculation_paused", source="eagle", **pool) == 1


async def test_metrics_are_by_pool(cluster: Cluster) -> None:
    cluster["p0"].cached = 12
    cluster["p0"].load = WorkerLoad(
        step=1, num_blocks=100, num_free_blocks=60, num_waiting=3, transfer_bytes=500, host=HOST
    )
    await collect(cluster, job())
    cluster["p0"].say()  # the same bytes, said again
    await cluster.until(lambda: cluster.fleet.status()[0].load.step == 3)

    value, expected = metrics_of(cluster), {
        "kv_blocks_used": 40, "waiting": 3, "prompt_tokens_total": len(PROMPT), "prefix_hit_tokens_total": 12,
        "transfer_bytes_total": 500, "host_kv_blocks": 50, "host_kv_blocks_used": 20, "host_hit_tokens_total": 8,
        "host_load_seconds_total": 0.5,
    }  # fmt: skip
    assert {name: value(f"pool_{name}", pool="prefill") for name in expected} == expected
    assert value("pool_host_hit_tokens_total", pool="decode") == 0
    assert value("pool_workers", pool="decode", state="ready") == 1
    await cluster["p0"].die()
    await cluster.until_state("p0", WorkerState.LOST)
    assert value("pool_workers", pool="prefill", state="lost") == 1
    assert value("pool_losses_total", pool="prefill") == 1
    assert value("pool_transfer_bytes_total", pool="prefill") == 500
    await cluster["p0"].restart()


async def test_another_gateways_prompt_counts_until_reported(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.offers.ELSEWHERE_S", 0.02)
    cluster = make()
    await cluster.add("c0")

    def queued() -> int:
        [candidate] = cluster.fleet.offers.candidates(NO_MATCH, 1)
        return candidate.queued_prefill_tokens

    cluster.fleet.offers.routed_elsewhere("c0", 4, 1)
    cluster.fleet.offers.routed_elsewhere("nobody", 4, 1)
    assert queued() == 3 * BLOCK_SIZE
    async with asyncio.timeout(60):
        while queued():  # noqa: ASYNC110 - nothing is notified
            await asyncio.sleep(0.01)
