"""Decisions and changes of capacity as tables: `baton why --capacity`, `baton plan`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.status_verb import clock, fleet_of, fleet_words, planner_words
from cluster.cli.terminal_tables import Sheet
from protos.values import WorkerRole
from router.fleet_owner import DesiredFleet

View = Mapping[str, Any]
NUM_SHOWN = 12


def capacity_view(report: View, *, now: float | None = None) -> RenderableType:
    """The reply of /admin/capacity: the fleet, its planner, the latest decisions with their reasons, and changes."""
    now = time.time() if now is None else now
    parts: list[RenderableType] = [*_headline(report, now)]
    decisions = (report["planner"] or {}).get("decisions", [])
    if decisions:
        parts += ["", _decisions(decisions[-NUM_SHOWN:], now), "", weighed_table(decisions[-1]["weighed"])]
    if report["changes"]:
        parts += ["", _changes(report["changes"][-NUM_SHOWN:], now)]
    return Group(*parts)


def weighed_table(weighed: Sequence[View]) -> RenderableType:
    """The fleets that a decision weighed, the best one first."""
    table = Sheet("Weighed", "fleet", "in time", "device seconds")
    for one in weighed:
        table.add_row(counts_words(one["counts"]), f"{one['attainment']:.1%}", f"{one['cost']:,.0f}")
    return table if table.row_count else Text("")


def counts_words(counts: Mapping[WorkerRole, int]) -> str:
    """A fleet in words: 1 prefill + 2 decode."""
    return str(DesiredFleet(counts=dict(counts)))


def _headline(report: View, now: float) -> Iterator[Text]:
    waiting = ", ".join(report["waiting_for"])
    yield Text(f"fleet: {fleet_words(report['desired'])}" + (f", waiting for {waiting}" if waiting else ""))
    planner = report["planner"]
    if planner is None:
        yield Text("no planner runs: operators alone change the fleet (`baton serve --autoscale`, or `baton plan`)")
        return
    yield Text(
        f"planner: {planner['attainment']:.0%} of the requests within {1000 * planner['ttft_s']:g} ms to the first "
        f"token and {1000 * planner['tpot_s']:g} ms between tokens; {planner_words(planner, now)}"
    )
    if planner["silent"]:
        yield Text(f"reports are late from {', '.join(planner['silent'])}: no worker goes meanwhile", "yellow")


def _decisions(decisions: Sequence[View], now: float) -> Sheet:
    table = Sheet("Decisions", "at", "in time", "requests/s", "in line", "decision", "reason",
                  prose=["reason"])  # fmt: skip
    for one in decisions:
        table.add_row(
            clock(one["at_s"]), f"{one['attainment']:.1%}", f"{one['arrival_rate']:.3g}", str(one["num_waiting"]),
            _decision(one), f"{one['reason']}{_refused(one)}",
        )  # fmt: skip
    return table


def _decision(one: View) -> str:
    if one["counts"] == one["desired"]:
        return "keep"
    return counts_words(one["counts"]) + (f" (change {one['change']})" if one["change"] else "")


def _refused(one: View) -> str:
    return f"; refused: {one['refused']}" if one["refused"] else ""


def _changes(changes: Sequence[View], now: float) -> Sheet:
    table = Sheet("Changes", "number", "at", "by", "from", "to", "outcome", "why",
                  prose=["why"])  # fmt: skip
    for one in changes:
        outcome = one["state"] + (f" after {one['ended_s'] - one['at_s']:.1f} s" if one["state"] == "reached" else "")
        flip = f", {one['worker_id']} changes its role" if one["worker_id"] else ""
        before, after = fleet_of(one["before"]), fleet_of(one["after"])
        revision = f" at {after.revision}" if after.revision != before.revision else ""
        table.add_row(
            str(one["number"]), clock(one["at_s"]), one["who"] or "an operator",
            counts_words(before.counts), f"{counts_words(after.counts)}{revision}{flip}", outcome,
            one["reason"] or one["why"],
        )  # fmt: skip
    return table
