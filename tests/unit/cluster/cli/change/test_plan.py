"""`baton plan`: the planner's decision about a running cluster, as advice; and `baton why --capacity`."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from cluster.cli.change.decisions import capacity_view
from cluster.cli.change.plan import advice, commands, observed, settings_for
from protos.errors import Misconfigured, Unavailable
from router.fleet_owner import (
    CapacityDecision,
    ChangeState,
    DesiredFleet,
    FleetChange,
    FleetReport,
    OrderKind,
    PlannerReport,
    Revision,
    SeenSight,
)
from tests.unit.cluster.capacity.staged_fleet import DECODE, PREFILL
from tests.unit.cluster.planner.test_planned_fleet import sight

NOW = 1_800_000_000.0
SMALL = DesiredFleet(counts={PREFILL: 1, DECODE: 1})
REPORT = FleetReport(desired=SMALL, serving={PREFILL: 1, DECODE: 1})
OBJECTIVE = {"ttft_s": 1.0, "tpot_s": 0.05, "attainment": 0.95}
NOTHING = dict.fromkeys(OBJECTIVE)
PLANNED = replace(
    REPORT,
    planner=PlannerReport(
        ttft_s=1.0, tpot_s=0.05, attainment=0.95, least={PREFILL: 1, DECODE: 1}, most={PREFILL: 8, DECODE: 8},
        manual_until_s=NOW + 60,
        decisions=(
            CapacityDecision(at_s=NOW, desired=SMALL.counts, counts={PREFILL: 2, DECODE: 1}, reason="prompts wait",
                             attainment=0.5, arrival_rate=2.0, num_waiting=7, change=3),
        ),
    ),
)  # fmt: skip


def seen(num: int, ttft_s: float = 0.1) -> list[SeenSight]:
    return [SeenSight(sight=sight("a", NOW, num=num, ttft_s=ttft_s, num_waiting=0), age_s=1.0)]


def test_the_advice_is_the_planners_decision_as_a_command() -> None:
    settings = settings_for(REPORT, "1:4", OBJECTIVE, 60.0, {})
    decision, shown = advice(REPORT, settings, seen(120, ttft_s=5.0), lambda: NOW)
    assert decision.counts[PREFILL] > 1
    assert commands(REPORT.desired.counts, decision) == [f"baton scale prefill={decision.counts[PREFILL]}"]
    assert shown.weighed
    three = {PREFILL: 3, DECODE: 3}
    large = replace(REPORT, desired=DesiredFleet(counts=three), serving=three)
    decision, _ = advice(large, settings, seen(0), lambda: NOW)
    assert commands(large.desired.counts, decision) == ["baton scale prefill=1 decode=1"]
    decision, _ = advice(REPORT, settings, seen(0), lambda: NOW)
    assert commands(REPORT.desired.counts, decision) == ["keep 1 prefill + 1 decode"]


def test_without_a_request_the_advice_promises_no_attainment() -> None:
    three = {PREFILL: 3, DECODE: 3}
    large = replace(REPORT, desired=DesiredFleet(counts=three), serving=three)
    decision, _ = advice(large, settings_for(REPORT, "1:4", OBJECTIVE, 60.0, {}), seen(0), lambda: NOW)
    assert decision.reason == "no requests; 1 prefill + 1 decode would do"


def test_objective_and_limits_default_to_the_clusters() -> None:
    with pytest.raises(Misconfigured, match="give --ttft-ms and --tpot-ms and --autoscale"):
        settings_for(REPORT, "", NOTHING, 60.0, {})
    settings = settings_for(PLANNED, "", NOTHING | {"ttft_s": 2.0}, 60.0, {PREFILL: 2})
    assert (settings.objective.ttft_s, settings.objective.tpot_s) == (2.0, 0.05)
    assert (settings.limits.most[PREFILL], settings.limits.devices[PREFILL]) == (8, 2)


def test_it_waits_for_reports_that_reach_back_but_not_forever() -> None:
    young = msgspec.structs.replace(seen(1)[0].sight, covered_s=3.0)
    replies, shown = [(), (SeenSight(sight=young, age_s=0.0),), tuple(seen(1))], list[str]()
    assert observed(lambda: replies.pop(0), 60.0, shown.append, clock=lambda: 0.0, sleep=lambda _: None) == tuple(
        seen(1)
    )
    assert shown == ["gateways begin to observe within 10 s, and the decision comes 60 s later"]
    times = iter((0.0, 31.0))
    with pytest.raises(Unavailable, match="no gateway has reported for 30 s"):
        observed(lambda: (), 60.0, shown.append, clock=lambda: next(times), sleep=lambda _: None)


def test_why_capacity_shows_a_rolls_changes() -> None:
    rolled = replace(SMALL, revision=Revision(name="d470", model="/m", settings={"worker.max_num_seqs": 32}))
    there = FleetChange(number=1, kind=OrderKind.ROLL, who="", why="", before=SMALL, after=rolled, at_s=NOW)
    further = replace(SMALL, revision=Revision(name="07e1", model="/m", settings={"worker.max_num_seqs": 8}))
    back = FleetChange(number=2, kind=OrderKind.ABORT, who="", why="", before=further, after=rolled, at_s=NOW)
    console = Console(width=300, record=True, file=io.StringIO())
    report = replace(REPORT, desired=rolled, changes=(there, back))
    console.print(capacity_view(msgspec.to_builtins(report), now=NOW))
    text = console.export_text()
    revision = "1 prefill + 1 decode at revision d470 (model /m, worker.max_num_seqs=32)"
    assert f"fleet: {revision}" in text
    assert len(re.findall(rf"1 prefill \+ 1 decode +{re.escape(revision)}", text)) == 2, "also what an abort keeps"


def test_why_capacity_shows_objective_decisions_and_changes() -> None:
    change = FleetChange(
        number=3, kind=OrderKind.SCALE, who="planner", why="prompts wait", before=SMALL,
        after=DesiredFleet(counts={PREFILL: 2, DECODE: 1}), at_s=NOW, state=ChangeState.REACHED, ended_s=NOW + 4.0,
    )  # fmt: skip
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(capacity_view(msgspec.to_builtins(replace(PLANNED, changes=(change,))), now=NOW))
    text = console.export_text()
    for part in (
        "95% of the requests within 1000 ms to the first token and 50 ms between tokens; prefill 1 to 8, decode 1 to 8",
        "for 1 min more",
        "50.0%           2        7  2 prefill + 1 decode (change 3)  prompts wait",
        "reached after 4.0 s",
    ):
        assert part in text, text
    console.print(capacity_view(msgspec.to_builtins(REPORT), now=NOW))
    assert "no planner runs: operators alone change the fleet" in console.export_text()
