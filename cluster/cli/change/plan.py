"""`baton plan`: what the planner would do with a running cluster. It changes nothing.

gateways report what their clients see ─▶ the planner's own decision, made here ─▶ the commands that would follow it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console

from cluster.cli.admin_client import DEFAULT_URL, AdminKey, GatewayUrl, open_client, request_json
from cluster.cli.change.decisions import weighed_table
from cluster.planner.planner import Planner, PlannerSettings, SightsNow, reported
from cluster.planner.planner_config import limits_of
from cluster.planner.planner_values import FleetDecision, FleetObjective, PlannerPace
from protos.errors import Misconfigured, Unavailable
from protos.values import WorkerRole
from router.fleet_owner import DesiredFleet, FleetReport, NoFleetOwner, SeenSight

PERIOD_S = 1.0
PATIENCE_S = 30.0
"""Until the first report of a gateway: each looks every 10 s whether one is wanted."""


def plan(
    autoscale: Annotated[
        str, typer.Option(help="Least and most workers of a pool, as 1:8 (needed without a planner).")
    ] = "",
    ttft_ms: Annotated[
        float | None, typer.Option(help="Objective: milliseconds to the first token (needed without a planner).")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Objective: milliseconds per further token (needed without a planner).")
    ] = None,
    attainment: Annotated[float | None, typer.Option(min=0, max=1, help="Share of requests to meet it.")] = None,
    window_s: Annotated[float, typer.Option("--for", min=5, max=60, help="Seconds of load to decide from.")] = 60.0,
    url: GatewayUrl = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The decision, as JSON.")] = False,
    api_key: AdminKey = "",
) -> None:
    """Show which fleet the planner would choose for the present load, and why. It changes nothing."""
    with open_client(url, api_key) as client:
        report = _report(client)
        given = {"ttft_s": _seconds(ttft_ms), "tpot_s": _seconds(tpot_ms), "attainment": attainment}
        settings = settings_for(report, autoscale, given, window_s, _devices(request_json(client, "/admin/status")))
        seen = observed(lambda: _sights(client), window_s, typer.echo if not as_json else lambda _: None)
        report = _report(client)
    reach_s = min(one.sight.covered_s for one in seen)
    decision, shown = advice(report, replace(settings, window_s=reach_s), seen)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
        return
    typer.echo(decision.reason)
    for line in commands(report.desired.counts, decision):
        typer.echo(line)
    Console().print("", weighed_table(msgspec.to_builtins(shown.weighed)))


def advice(
    report: FleetReport,
    settings: PlannerSettings,
    seen: Sequence[SeenSight],
    wall_clock: Callable[[], float] = time.time,
) -> tuple[FleetDecision, Any]:
    """The decision of a planner that begins now, and the same for people."""
    latest = sorted(seen, key=lambda one: -one.age_s)
    looked = SightsNow(sights=[one.sight for one in latest], age_s=latest[-1].age_s if latest else 0.0)
    planner = Planner(settings, NoFleetOwner(), lambda: looked, wall_clock=wall_clock)
    decision, observation = planner.advise(report)
    return decision, reported(decision, observation, report.desired.counts)


def settings_for(
    report: FleetReport,
    autoscale: str,
    given: Mapping[str, float | None],
    window_s: float,
    devices: Mapping[WorkerRole, int],
) -> PlannerSettings:
    """Returns the settings of the command line, else of the cluster's planner. Raises Misconfigured without either."""
    planner, desired = report.planner, report.desired.counts
    of_planner = {name: getattr(planner, name) for name in given} if planner is not None else {"attainment": 0.95}
    chosen = {name: of_planner.get(name) if value is None else value for name, value in given.items()}
    bounds = autoscale or (
        ",".join(f"{role}={planner.least[role]}:{planner.most[role]}" for role in desired if planner.most[role])
        if planner is not None
        else ""
    )
    missing = [f"--{name.removesuffix('_s')}-ms" for name in ("ttft_s", "tpot_s") if chosen[name] is None]
    missing += [] if bounds else ["--autoscale"]
    if missing:
        raise Misconfigured(
            f"no planner runs there that has an objective: give {' and '.join(missing)}, as `baton plan --autoscale "
            "1:8 --ttft-ms 1000 --tpot-ms 50`",
            param="autoscale",
        )
    counted = {role: devices.get(role, 1) for role in desired}
    absent = [role for role, count in desired.items() if not count and role is not WorkerRole.PREFILL]
    return PlannerSettings(
        objective=FleetObjective(**{name: float(value or 0.0) for name, value in chosen.items()}),
        limits=limits_of(bounds, counted, absent=absent if any(desired.values()) else ()),
        pace=PlannerPace(settle_s=0.0, rest_s=0.0),
        window_s=window_s,
        manual_s=0.0,
    )


def observed(
    sights: Callable[[], Sequence[SeenSight]],
    window_s: float,
    show: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[SeenSight]:
    """The reports of all gateways once they reach back far enough. Raises Unavailable if none comes."""
    begun_s, announced = clock(), False
    while True:
        seen = sights()
        reach_s = min((one.sight.covered_s for one in seen), default=0.0)
        if seen and reach_s >= window_s - PERIOD_S:
            return seen
        if not seen and clock() - begun_s > PATIENCE_S:
            raise Unavailable(f"no gateway has reported for {PATIENCE_S:g} s what its clients see: look at their logs")
        if not announced:
            show(f"gateways begin to observe within 10 s, and the decision comes {window_s:g} s later")
            announced = True
        sleep(PERIOD_S)


def commands(desired: Mapping[WorkerRole, int], decision: FleetDecision) -> list[str]:
    """The commands that would follow the decision."""
    if dict(decision.counts) == dict(desired):
        return [f"keep {DesiredFleet(counts=dict(desired))}"]
    lines = [f"baton flip {source}-N {target}    # one of the {source} workers" for source, target in decision.flips]
    if not lines or sum(decision.counts.values()) != sum(desired.values()):
        changed = (f"{role}={count}" for role, count in decision.counts.items() if count != desired.get(role))
        lines = [f"baton scale {' '.join(changed)}"]
    return lines


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _devices(status: Mapping[str, Any]) -> dict[WorkerRole, int]:
    infos = [one["info"] for one in status["workers"] if one["info"]]
    return {WorkerRole(info["role"]): info["layout"]["tp"] for info in infos}


def _report(client: httpx.Client) -> FleetReport:
    return msgspec.convert(request_json(client, "/admin/capacity"), FleetReport)


def _sights(client: httpx.Client) -> Sequence[SeenSight]:
    return msgspec.convert(request_json(client, "/admin/capacity/sights")["sights"], tuple[SeenSight, ...])
