"""The planner beside what gateways report: a fleet without processes, and a clock that the test moves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import pytest

from cluster.capacity.controller import FleetController
from cluster.planner.planned_fleet import PlannedFleet
from cluster.planner.planner import NAME, KeptLoad
from cluster.planner.planner_config import PlannerConfig, limits_of
from cluster.planner.planner_values import FleetDecision, LearnedLoad, PlannerMemory
from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.fleet_owner import (
    DesiredFleet,
    FleetOrder,
    GatewaySight,
    OrderKind,
    PlannerReport,
    RequestSample,
    Revision,
    WorkerSight,
)
from tests.unit.cluster.capacity.staged_fleet import CONFIGURED, DECODE, PREFILL, StagedFleet, scale

CONFIG = PlannerConfig(autoscale="1:4", period_s=15.0, settle_s=120.0, manual_s=300.0)
SMALL, LARGE = {PREFILL: 1, DECODE: 1}, {PREFILL: 1, DECODE: 2}


class PlannedCluster:
    """A fleet of one prefill and two decode workers, its planner, and gateways a and b."""

    def __init__(self, config: PlannerConfig = CONFIG, kept: KeptLoad | None = None) -> None:
        self.now = 1_800_000_000.0
        self.fleet = StagedFleet()
        owner = FleetController(self.fleet, CONFIGURED, wall_clock=lambda: self.now)
        settings = config.settings({PREFILL: 1, DECODE: 1}, ttft_ms=1000, tpot_ms=50)
        clock = lambda: self.now  # noqa: E731
        self.owner = PlannedFleet(owner, settings, kept=kept, clock=clock, wall_clock=clock)

    async def reports(self, *names: str, num: int = 0, ttft_s: float = 0.1, num_waiting: int = 0) -> None:
        for name in names:
            await self.owner.report(sight(name, self.now, num=num, ttft_s=ttft_s, num_waiting=num_waiting))

    async def plan(self) -> Mapping[WorkerRole, int]:
        """The desired fleet after one decision."""
        assert self.owner._planner is not None
        await self.owner._planner.plan()
        if self.fleet.begun and not self.fleet.begun[-1].done():
            self.fleet.arrive()
            await self.owner._owner.ended((await self.owner.view()).changes[-1].number)  # type: ignore[attr-defined]
        return (await self.owner.view()).desired.counts

    async def report(self) -> PlannerReport:
        planner = (await self.owner.view()).planner
        assert planner is not None
        return planner

    async def quiet(self, *names: str, minutes: int = 10) -> Mapping[WorkerRole, int]:
        """Minutes without a request, which these gateways report."""
        counts: Mapping[WorkerRole, int] = {}
        for _ in range(6 * minutes):
            self.now += 10.0
            await self.reports(*names)
            counts = await self.plan()
        return counts


def sight(name: str, now: float, *, num: int, ttft_s: float, num_waiting: int) -> GatewaySight:
    """A minute with `num` requests, all ended."""
    ended = [
        RequestSample(received_s=now - 20, first_s=now - 20 + ttft_s, last_s=now - 15, ended_s=now - 15,
                      num_prompt_tokens=2000, num_cached_tokens=0, num_tokens=200, failed=False)
        for _ in range(num)
    ]  # fmt: skip
    workers = [
        WorkerSight(worker_id=f"{role}-0", role=role, state="ready", num_running=8, queued_prefill_tokens=0,
                    decode_step_s=0.02, prefill_tokens_per_s=2000.0, num_kv_tokens=10**6)
        for role in (PREFILL, DECODE)
    ]  # fmt: skip
    return GatewaySight(
        gateway_id=name, now_s=now, covered_s=60.0, num_arrived=num, num_waiting=num_waiting, samples=tuple(ended),
        workers=tuple(workers),
    )  # fmt: skip


async def test_reports_of_two_gateways_grow_the_fleet_with_a_reason() -> None:
    cluster = PlannedCluster()
    await cluster.reports("a", "b", num=60, ttft_s=5.0, num_waiting=30)
    flipped = await cluster.plan()
    assert flipped == {PREFILL: 2, DECODE: 1}, "each gateway alone sees one prompt of a second a second"
    grown = await cluster.plan()
    assert sum(grown.values()) > sum(flipped.values()), "the flip came first, and the starts follow"
    changes = (await cluster.owner.view()).changes
    assert [(change.who, change.kind) for change in changes] == [(NAME, OrderKind.FLIP), (NAME, OrderKind.SCALE)]
    assert "0.0% in time at 2 requests/s, 60 in line" in changes[0].why
    first, second = (await cluster.report()).decisions
    assert (first.change, first.desired) == (1, CONFIGURED.counts)
    assert (second.change, second.desired, second.counts) == (2, flipped, grown)
    assert first.weighed


async def test_one_silent_gateway_prevents_shrinking() -> None:
    assert await PlannedCluster().quiet("a", "b") == SMALL
    cluster = PlannedCluster()
    await cluster.reports("a", "b")
    assert await cluster.quiet("a", minutes=1) == LARGE
    cluster.now += 50.0
    await cluster.reports("a")
    assert await cluster.plan() == LARGE, "b may have requests that no one knows of"
    assert (await cluster.report()).silent == ("b",)
    assert await cluster.quiet("a") == SMALL, "b has ended"


async def test_without_any_report_nothing_changes() -> None:
    cluster = PlannedCluster()
    assert await cluster.quiet() == LARGE
    assert (await cluster.report()).decisions[-1].reason == "no decision without a fresh observation: there is none"


async def test_a_manual_change_is_left_alone_until_a_stated_time() -> None:
    cluster = PlannedCluster()
    await cluster.owner.order(scale(decode=3))
    cluster.fleet.arrive()
    held_until_s = cluster.now + CONFIG.manual_s
    assert (await cluster.quiet("a", minutes=4))[DECODE] == 3
    assert (await cluster.report()).manual_until_s == held_until_s
    assert await cluster.quiet("a") == SMALL
    assert (await cluster.report()).manual_until_s == 0.0


async def test_a_fleet_that_a_request_woke_is_planned_at_once() -> None:
    cluster = PlannedCluster(PlannerConfig(autoscale="0:4", settle_s=60.0))
    assert not any((await cluster.quiet("a")).values()), "without requests it sleeps"
    await cluster.owner.order(FleetOrder(kind=OrderKind.WAKE, who="a request"))
    assert (await cluster.report()).manual_until_s == 0.0


async def test_a_refused_order_is_reported_and_paused() -> None:
    cluster = PlannedCluster()
    cluster.fleet.most = 3
    for _ in range(4):
        await cluster.reports("a", num=120, ttft_s=5.0, num_waiting=60)
        await cluster.plan()
    flipped, grown, *later = (await cluster.report()).decisions
    assert (flipped.refused, flipped.change) == ("", 1)
    assert "GPUs, and there are 3" in grown.refused
    assert not any(decision.refused for decision in later)
    assert (await cluster.owner.view()).desired.counts == {PREFILL: 2, DECODE: 1}


async def test_the_planner_waits_for_the_end_of_a_roll() -> None:
    cluster = PlannedCluster()
    revise = lambda current, order: Revision(name="new")  # noqa: E731
    cluster.owner._owner._revise = revise  # type: ignore[attr-defined]
    await cluster.owner.order(FleetOrder(kind=OrderKind.ROLL, model="/models/new", who="ann"))
    await cluster.reports("a", num=120, ttft_s=5.0, num_waiting=60)
    assert cluster.owner._planner is not None
    await cluster.owner._planner.plan()
    assert (await cluster.report()).decisions[-1].refused == "change 1 rolls the fleet: this waits for its end"
    while (await cluster.owner.view()).rolling is not None:
        if not cluster.fleet.begun[-1].done():
            cluster.fleet.arrive()
        await asyncio.sleep(0)
    cluster.now += 10.0
    await cluster.reports("a", num=120, ttft_s=5.0, num_waiting=60)
    assert await cluster.plan() != CONFIGURED.counts
    assert (await cluster.report()).manual_until_s == 0.0


async def test_a_decision_of_a_flip_and_a_start_flips_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def grown(*_: object, now: float, **__: object) -> FleetDecision:
        return FleetDecision(
            at_s=now, counts={PREFILL: 3, DECODE: 1}, reason="late", flips={(DECODE, PREFILL): 1},
            memory=PlannerMemory(),
        )  # fmt: skip

    monkeypatch.setattr("cluster.planner.planner.decide", grown)
    cluster = PlannedCluster()
    await cluster.reports("a", num=60)
    assert await cluster.plan() == {PREFILL: 2, DECODE: 1}
    [change] = (await cluster.owner.view()).changes
    assert (change.kind, change.worker_id, change.who) == (OrderKind.FLIP, "decode-0", NAME)


async def test_a_bug_in_a_decision_changes_nothing_and_operators_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlannedCluster(PlannerConfig(autoscale="1:4", period_s=0.1))
    monkeypatch.setattr("cluster.planner.planner.decide", lambda *_, **__: 1 / 0)
    cluster.owner.start()
    await cluster.reports("a", num=120, ttft_s=5.0)
    assert (await cluster.owner.order(scale(decode=3))).number == 1
    await cluster.owner.close()
    assert (await cluster.owner.view()).desired == DesiredFleet(counts={PREFILL: 1, DECODE: 3})


@pytest.mark.parametrize(
    ("within", "least", "most"),
    [
        ("1:8", SMALL, {PREFILL: 8, DECODE: 8}),
        ("prefill=0:4, decode=1:2", {PREFILL: 0, DECODE: 1}, {PREFILL: 4, DECODE: 2}),
    ],
)
def test_limits_are_of_every_pool_or_of_each(
    within: str, least: Mapping[WorkerRole, int], most: Mapping[WorkerRole, int]
) -> None:
    limits = limits_of(within, {PREFILL: 1, DECODE: 2})
    assert (limits.least, limits.most) == (least, most)
    assert limits.max_devices == most[PREFILL] + 2 * most[DECODE]


@pytest.mark.parametrize(
    ("within", "message"),
    [
        ("8", "--autoscale 8: give the least and the most workers of a pool, as 1:8, or of each pool"),
        ("4:2", "--autoscale 4:2: give the least and the most"),
        ("colocated=1:2", "this cluster has no colocated pool: give prefill and decode"),
        ("decode=1:2", "give the limits of prefill, too"),
        ("prefill=1:2,decode=0:2", "without decode workers no answers are written"),
    ],
)
def test_impossible_limits_are_refused_with_a_fix(within: str, message: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(message)):
        limits_of(within, {PREFILL: 1, DECODE: 1})


async def test_the_next_planner_keeps_the_learned_profile() -> None:
    learned: list[LearnedLoad] = []
    cluster = PlannedCluster(kept=KeptLoad(earlier=None, save=learned.append))
    await cluster.reports("a", num=60)
    await cluster.plan()
    assert max(learned[-1].profile) > 0.0
    later = PlannedCluster(kept=KeptLoad(earlier=learned[-1], save=learned.append))
    later.now = cluster.now + 86_400.0
    await later.reports("a")
    await later.plan()
    assert max(learned[-1].profile) > 0.0, "the day before"
