"""Every kind of fault does something: what people, or gateways, notice of it, against the same run without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import pytest

from cluster.simulate.run.deployment import SimulatedGateway
from cluster.simulate.run.simulation_config import simulated_router
from cluster.simulate.world.fake_redis import Server
from cluster.simulate.world.faults import Kind
from cluster.simulate.world.simulated_lanes import Cards
from protos.values import Hello, KVEvents
from router.prefix.feed import Feed
from router.prefix.redis_index import RedisFeed
from router.router_config import DispatchConfig
from tests.unit.cluster.simulate.towns import run

PAIR: dict[str, Any] = {
    "prefill": 1,
    "decode": 1,
    "router": simulated_router(local_prefill_tokens=0, dispatch=DispatchConfig(ticket_lease_s=2.0)),
    "cards": Cards(rate=1e9),
}
"""Every prompt is handed over, and its KV travels for as long as a few steps take."""
READERS: dict[str, Any] = {
    "workload": "conversations",
    "prefill": 0,
    "decode": 2,
    "router": simulated_router(policy="prefix_aware", dispatch=DispatchConfig(speculative_prefix_ttl_s=0.0)),
}
"""The choice of a worker depends on what gateways know of caches."""
SHARING = {**READERS, "num_gateways": 2, "shared_index": True}
PATIENT = {**PAIR, "router": simulated_router(local_prefill_tokens=0, dispatch=DispatchConfig(ticket_lease_s=60.0))}
TOWNS = {"pair": PAIR, "patient": PATIENT, "readers": READERS, "sharing": SHARING}


@dataclass(slots=True, kw_only=True)
class Felt:
    """Seconds are means over requests that were answered, `num_again` attempts after the first of each. Of KV events:
    how many gateways were told, when on average, and how often they had missed some. Of the store: how often gateways
    lost it, and were to tell it all that a worker has."""

    ttft_s: float
    e2e_s: float
    num_cached: int
    num_again: int
    errors: set[str]
    num_told: int
    told_s: float
    num_gaps: int
    num_outages: int
    num_snapshots: int


@cache
def felt(where: str, *faults: str) -> Felt:
    told: list[float] = []
    gaps: list[Hello] = []
    outages: list[int] = []
    snapshots: list[Any] = []
    receive, stop, keep = Feed.receive, SimulatedGateway.stop, Server._snapshot

    def listen(feed: Feed, worker_id: str, message: KVEvents) -> Hello | None:
        told.extend([asyncio.get_running_loop().time()] * len(message.events))
        hello = receive(feed, worker_id, message)
        gaps.extend([hello] if hello is not None else [])
        return hello

    async def look_and_stop(gateway: SimulatedGateway) -> None:
        outages.extend([gateway.feed.num_outages] if isinstance(gateway.feed, RedisFeed) else [])
        await stop(gateway)

    def keep_and_count(server: Server, *asked: Any) -> Any:
        snapshots.append(asked)
        return keep(server, *asked)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Feed, "receive", listen)
        patches.setattr(SimulatedGateway, "stop", look_and_stop)
        patches.setattr(Server, "_snapshot", keep_and_count)
        outcome, lines = run(*faults, audit_every=0, **TOWNS[where])
    answered = [record for record in outcome.records if not record.error]
    decisions = [line.rpartition("by=")[2].split(",") for line in lines if " ended r" in line]
    return Felt(
        ttft_s=fmean(answer.ttft_s or 0.0 for answer in answered),
        e2e_s=fmean(answer.e2e_s or 0.0 for answer in answered),
        num_cached=sum(answer.num_cached or 0 for answer in answered),
        num_again=sum(len(made) - 1 for made in decisions),
        errors={record.error for record in outcome.records if record.error},
        num_told=len(told),
        told_s=fmean(told),
        num_gaps=len(gaps),
        num_outages=sum(outages),
        num_snapshots=len(snapshots),
    )


Hurts = Callable[[Felt, Felt], bool]
CASES: dict[Kind, tuple[str, str, Hurts]] = {
    Kind.KILL: ("pair", "0.5 kill decode-0", lambda was, now: now.num_again > was.num_again),
    Kind.PAUSE: ("pair", "0.5 pause decode-0 for 1", lambda was, now: now.e2e_s > 1.5 * was.e2e_s),
    Kind.SLOW: ("pair", "0.5 slow prefill-0 for 3 by 20", lambda was, now: now.ttft_s > 10 * was.ttft_s),
    Kind.RESET: ("pair", "0.5 reset decode-0", lambda was, now: now.num_again > was.num_again),
    Kind.DRAIN: ("pair", "0.5 drain decode-0", lambda was, now: now.ttft_s > 1.2 * was.ttft_s),
    Kind.CLOCK_SKEW: ("pair", "0.5 clock-skew decode-0 by 100", lambda was, now: now.num_again > was.num_again),
    Kind.LANE_STALL: ("pair", "0.1 lane-stall prefill-0>decode-0 for 1", lambda was, now: now.e2e_s > 1.5 * was.e2e_s),
    Kind.LANE_CUT: ("pair", "0.5 lane-cut prefill-0>decode-0", lambda was, now: now.num_again > was.num_again),
    Kind.LANE_SLOW: ("pair", "0 lane-slow prefill-0>decode-0 for 1 by 5", lambda was, now: now.e2e_s > 1.1 * was.e2e_s),
    Kind.EVENTS_DROP: ("readers", "0.1 events-drop decode-0 for 4", lambda was, now: now.num_gaps > was.num_gaps),
    Kind.EVENTS_DELAY: ("readers", "0.1 events-delay decode-0 for 4", lambda was, now: now.told_s > was.told_s),
    Kind.EVENTS_DOUBLE: ("readers", "0.1 events-double decode-0 for 4", lambda was, now: now.num_told > was.num_told),
    Kind.EVENTS_SWAP: ("readers", "0.1 events-swap decode-0 for 4", lambda was, now: now.num_gaps > was.num_gaps),
    Kind.INDEX_LOST: ("readers", "0.5 index-lost 0", lambda was, now: now.num_cached < was.num_cached),
    Kind.GATEWAY_RESTART: ("pair", "0.5 gateway-restart 0", lambda was, now: now.errors == {"gateway_lost"}),
    Kind.STORE_AWAY: ("sharing", "2 store-away redis for 1", lambda was, now: now.num_outages > was.num_outages),
    Kind.STORE_LOST: ("sharing", "2 store-lost redis for 1", lambda was, now: now.num_snapshots > was.num_snapshots),
    Kind.ABORTS: ("pair", "0.5 aborts clients by 1.0", lambda was, now: now.errors == {"aborted"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", Kind)
def test_a_fault_of_each_kind_hurts(kind: Kind) -> None:
    where, fault, hurts = CASES[kind]
    was, now = felt(where), felt(where, fault)
    assert hurts(was, now), f"nothing came of {fault}: {was} before, {now} after"


def test_a_lane_held_up_for_long_is_lost() -> None:
    """Production loses it after `kvtransfer.lane_rules.LaneConfig.stall_s`, whatever the lease: KV is sent anew."""
    assert felt("patient", "0.5 lane-stall prefill-0>decode-0 for 4.5").num_again == 0
    assert felt("patient", "0.5 lane-stall prefill-0>decode-0 for 5.5").num_again > 0
