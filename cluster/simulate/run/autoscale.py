"""The production planner and owner beside a simulated load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.bench.bench_report import Objective
from cluster.capacity.controller import FleetController
from cluster.planner.planner import Planner, PlannerSettings, SightsNow
from cluster.planner.planner_config import limits_of
from cluster.planner.planner_values import FleetDecision, FleetObjective
from cluster.simulate.run.deployment import SimulatedDeployment, SimulatedGateway
from cluster.simulate.run.simulation import Steer
from protos.errors import Misconfigured
from protos.event_loop import loop_time
from protos.values import WorkerRole
from router.fleet_owner import DesiredFleet, FleetChange, GatewaySight
from router.observe.samples import sample_of, sight_of

MAX_RECORDS = 100_000
"""The requests of a gateway that the planner can look back at."""


@dataclass(slots=True)
class PlannedRun:
    decisions: Sequence[FleetDecision] = ()
    changes: Sequence[FleetChange] = ()


def planner_settings(
    within: str, objective: Objective, attainment: float, devices: Mapping[WorkerRole, int]
) -> PlannerSettings:
    """`within`: as 1:8. `devices`: of a worker. Raises Misconfigured."""
    limits = limits_of(within, devices)
    if not all(least for role, least in limits.least.items() if role is not WorkerRole.PREFILL):
        raise Misconfigured(
            f"cluster.autoscale = {within!r}: give 1 or more: a simulated cluster does not sleep",
            param="cluster.autoscale",
        )
    if objective.ttft_s is None or objective.tpot_s is None:
        raise Misconfigured(
            "cluster.autoscale plans for objectives: give objectives.ttft_ms and tpot_ms", param="objectives.ttft_ms"
        )
    return PlannerSettings(
        objective=FleetObjective(ttft_s=objective.ttft_s, tpot_s=objective.tpot_s, attainment=attainment),
        limits=limits,
    )


def autoscaling(settings: PlannerSettings, planned: PlannedRun) -> Steer:
    async def steer(deployment: SimulatedDeployment) -> None:
        clock = asyncio.get_running_loop().time
        configured = DesiredFleet(counts=dict(deployment.config.pools.counts()))
        owner = FleetController(deployment, configured, wall_clock=clock)
        planner = Planner(settings, owner, lambda: _seen(deployment, settings.window_s), wall_clock=clock)
        try:
            await planner.run()
        finally:
            planned.decisions, planned.changes = tuple(planner.decisions), tuple(owner.changes)

    return steer


def _seen(deployment: SimulatedDeployment, window_s: float) -> SightsNow:
    return SightsNow(sights=[_sight(gateway, window_s) for gateway in deployment.gateways if gateway.alive])


def _sight(gateway: SimulatedGateway, window_s: float) -> GatewaySight:
    now = loop_time()
    samples = [sample_of(record) for record in gateway.records.recent(MAX_RECORDS)]
    touching = [sample for sample in samples if sample.ended_s is None or sample.ended_s >= now - window_s]
    return sight_of(
        gateway.name, touching, gateway.fleet.status(), now=now, covered_s=window_s,
        num_arrived=sum(sample.received_s >= now - window_s for sample in touching),
        num_waiting=gateway.admission.num_waiting,
    )  # fmt: skip
