"""The planner beside a simulated load: the fleet follows it, and no request fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.capacity.simulated_changes import run
from cluster.bench.bench_load import Lengths
from cluster.bench.bench_report import Objective
from cluster.config.cluster_config import PoolsConfig, SupervisionConfig
from cluster.planner.planner_values import ActionTimes, PlannerPace
from cluster.simulate.run.autoscale import MAX_RECORDS, PlannedRun, autoscaling, planner_settings
from cluster.simulate.run.simulation import SimulationOutcome, simulate
from cluster.simulate.run.simulation_config import SimulationConfig, hardware_spec, simulated_router
from cluster.simulate.world.simulated_load import GeneratedLoad, generated
from protos.errors import Misconfigured, NoWorkers
from protos.values import WorkerRole
from router.fleet_owner import ChangeState, OrderKind

DEVICES = {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 1}
OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.02)
ONE_EACH, LONG = PoolsConfig(prefill=1, decode=1), Lengths(low=6000, high=12000)


def planned_run(
    pools: PoolsConfig, load: GeneratedLoad, within: str = "1:4", **settings: Any
) -> tuple[SimulationOutcome, PlannedRun]:
    """A load whose planner decides every two seconds."""
    config = SimulationConfig(
        pools=pools,
        spec=hardware_spec(gpu="h100", model="llama-3-8b", tp=1, leaping=True),
        router=replace(simulated_router(), decision_history_size=MAX_RECORDS),
        supervision=SupervisionConfig(health_period_s=2.0, grace_s=30.0),
        load_s=5.0,
        seed=3,
    )
    settings = {"times": ActionTimes(start_s=5.0, drain_s=5.0, flip_s=5.0)} | settings
    planner = replace(planner_settings(within, OBJECTIVE, 0.95, DEVICES), period_s=2.0, window_s=8.0, **settings)
    planned = PlannedRun()
    return simulate(config, generated("poisson", load), steer=autoscaling(planner, planned)), planned


def test_a_pool_that_is_late_grows_and_no_request_fails() -> None:
    load = GeneratedLoad(num_requests=160, rate=5.0, prompts=LONG, outputs=Lengths(low=4, high=20), seed=3)
    outcome, planned = planned_run(ONE_EACH, load, pace=PlannerPace(settle_s=20.0, rest_s=20.0))
    assert not any(record.error for record in outcome.records)
    assert len(outcome.records) == 160
    first = planned.changes[0]
    assert first.after.counts[WorkerRole.PREFILL] > 1
    assert (first.who, first.state) == ("planner", ChangeState.REACHED)
    waits = [record.ttft_s or 0.0 for record in outcome.records]
    assert max(waits[-20:]) < max(waits), "the line has become shorter"


def test_a_fleet_that_shrinks_under_full_streams_drops_none() -> None:
    outputs = Lengths(low=1500, high=2500)
    load = GeneratedLoad(num_requests=80, rate=1.0, prompts=Lengths(low=200, high=2000), outputs=outputs, seed=3)
    pools, pace = PoolsConfig(prefill=1, decode=4), PlannerPace(settle_s=10.0, rest_s=5.0)
    outcome, planned = planned_run(pools, load, pace=pace)
    counts = [
        (change.at_s, change.before.counts[WorkerRole.DECODE], change.after.counts[WorkerRole.DECODE])
        for change in planned.changes
    ]
    shrunk_s = next(at_s for at_s, before, after in counts if after < before)
    during = [record for record in outcome.records if record.arrivals_s[0] < shrunk_s < record.arrivals_s[-1]]
    assert len(during) > 3, "else the load is too small for this test"
    assert not any(record.error for record in outcome.records)
    num_tokens = sum(turn.num_output for session in generated("poisson", load) for turn in session.turns)
    assert sum(record.num_output for record in outcome.records) == num_tokens


def test_waiting_requests_are_late_for_the_planner() -> None:
    load = GeneratedLoad(num_requests=160, rate=8.0, prompts=LONG, outputs=Lengths(low=4, high=20), seed=3)
    outcome, planned = planned_run(ONE_EACH, load, "1:1")
    last = [record for record in outcome.records if (record.due_s or 0.0) > 6.0]
    assert not any(OBJECTIVE.met(request) for request in last), "else the load is too small for this test"
    shares = [float(seen.reason.partition("%")[0]) for seen in planned.decisions if 16.0 < seen.at_s < 20.0]
    assert shares
    assert max(shares) < 5.0


@pytest.mark.parametrize(
    ("within", "objective"),
    [("8", OBJECTIVE), ("4:2", OBJECTIVE), ("0:2", OBJECTIVE), ("1:2", Objective(ttft_s=1.0))],
)
def test_bounds_and_objective_are_needed(within: str, objective: Objective) -> None:
    with pytest.raises(Misconfigured):
        planner_settings(within, objective, 0.95, DEVICES)


def test_changes_of_the_fleet_disturb_no_request() -> None:
    outcome, changes = run(seed=2, num_changes=8, period_s=0.6)
    assert {change.kind for change in changes} == {OrderKind.SCALE, OrderKind.FLIP}
    assert not any(failure.code == NoWorkers.code for failure in outcome.failures), "some worker serves at any time"
    assert any(change.state == "reached" for change in changes)
