"""The owner of the desired fleet behind Redis: a real server, a fleet without processes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from cluster.capacity.controller import FleetController, continued
from cluster.capacity.redis_fleet import RedisFleetOwner, learned_of, record_of, serve_calls
from cluster.discovery.redis_members import connect
from cluster.planner.planned_fleet import PlannedFleet
from cluster.planner.planner_values import LearnedLoad, LoadFactors, TooSmall
from protos.errors import InvalidRequest, Unavailable
from router.fleet_owner import ChangeState, GatewaySight, RequestSample
from tests.cluster.redis_server import RedisServer
from tests.unit.cluster.capacity.staged_fleet import CONFIGURED, DECODE, PREFILL, StagedFleet, scale

pytestmark = pytest.mark.cluster


async def test_a_remote_gateway_changes_the_fleet_and_the_record_stays(redis: RedisServer) -> None:
    fleet = StagedFleet()
    client = await connect(redis.url)
    store = record_of(client)
    assert await store.load() is None
    owner = FleetController(fleet, CONFIGURED, store=store)
    serving = asyncio.create_task(serve_calls(client, PlannedFleet(owner, None)))
    gateway = RedisFleetOwner(redis.url)
    change = await gateway.order(scale(decode=3))
    assert (change.number, change.after.counts) == (1, {PREFILL: 1, DECODE: 3})
    with pytest.raises(InvalidRequest, match="decode=0: give 1 to 4096"):
        await gateway.order(scale(decode=0))
    fleet.arrive()
    await owner.ended(1)
    sight = GatewaySight(
        gateway_id="a", now_s=1.0, covered_s=1.0, num_arrived=3, num_waiting=0, workers=(), samples=(
            RequestSample(received_s=0.5, first_s=None, last_s=None, ended_s=None, num_prompt_tokens=9,
                          num_cached_tokens=0, num_tokens=0, failed=False),
        ),
    )  # fmt: skip
    assert (await gateway.report(None)).window_s == 0.0, "without a planner no gateway observes"
    assert await gateway.sights() == (), "someone wants to know"
    assert (await gateway.report(sight)).window_s > 0.0
    assert [sight.sight for sight in await gateway.sights()] == [sight]
    report = await gateway.view()
    assert (report.reached, report.changes[0].state) == (True, ChangeState.REACHED)
    await gateway.close()
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    await owner.close()
    await store.close()

    later = record_of(client)
    record = continued(await later.load(), CONFIGURED)
    assert record is not None
    assert (record.desired.counts[DECODE], record.changes[0].who) == (3, "ann")
    await later.close()
    await client.aclose()


async def test_an_order_without_an_owner_is_refused_and_not_stored(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.capacity.redis_fleet.REPLY_S", 0.0)
    gateway = RedisFleetOwner(redis.url)
    with pytest.raises(Unavailable, match="no `baton pools` has answered"):
        await gateway.order(scale(decode=3))
    await gateway.close()
    client = await connect(redis.url)
    assert await client.exists("baton:fleet:calls") == 0
    await client.aclose()


async def test_a_planners_learned_day_outlives_it(redis: RedisServer) -> None:
    """The next `baton pools` knew no day."""
    client = await connect(redis.url)
    learned = learned_of(client, "b")
    assert await learned.load() is None
    refused = TooSmall(counts={PREFILL: 1, DECODE: 2}, prompt_rate=900.0, answer_rate=80.0, at_s=1.0, hold_s=3600.0)
    load = LearnedLoad(factors=LoadFactors(prefill=1.3), profile=(5.0, *(0.0,) * 95), too_small=(refused,))
    learned.save(load)
    await learned.close()
    later = learned_of(client, "b")
    assert await later.load() == load
    await later.close()
    await client.aclose()
