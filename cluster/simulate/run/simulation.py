"""One run, from its configuration to its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.bench.bench_report import Percentiles, RequestRecord
from cluster.simulate.run.clients import Clients, Failure
from cluster.simulate.run.deployment import SimulatedDeployment, WorkerLife
from cluster.simulate.run.fault_injector import Happened, Trouble, check
from cluster.simulate.run.invariants import Invariants
from cluster.simulate.run.run_progress import Look
from cluster.simulate.run.simulation_config import SimulationConfig
from cluster.simulate.run.utilisation import SimulationTimeline, TimelineSample
from cluster.simulate.world.clock import VirtualLoop, run_virtually
from cluster.simulate.world.event_log import SimulationLog
from cluster.simulate.world.faults import Fault, Kind
from cluster.simulate.world.simulated_load import UserSession

NUM_SAMPLES = 150
Steer = Callable[[SimulatedDeployment], Coroutine[Any, Any, None]]
"""Changes the fleet of a deployment until it is cancelled at the end of the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """`fingerprint`: hash of the event log, equal for equal seeds and configurations. `num_not_asked`: turns whose
    conversation had failed."""

    config: SimulationConfig
    records: Sequence[RequestRecord]
    num_not_asked: int
    fingerprint: str
    num_events: int
    num_callbacks: int
    duration_s: float
    served: Sequence[WorkerLife]
    itl_s: Percentiles | None
    samples: Sequence[TimelineSample]
    num_handed_over: int
    transfer_bytes: int
    faults: Sequence[Happened] = ()
    failures: Sequence[Failure] = ()


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C. `at_s`: seconds since the load began."""

    def __init__(self, at_s: float | None) -> None:
        super().__init__(at_s)
        self.at_s = at_s

    def __str__(self) -> str:
        return f"interrupted at {self.at_s:,.2f} s of the load" if self.at_s else "interrupted before the load began"


def simulate(
    config: SimulationConfig,
    sessions: Sequence[UserSession],
    faults: Sequence[Fault] = (),
    *,
    write: Callable[[str], object] | None = None,
    watch: Callable[[Look | None], object] | None = None,
    steer: Steer | None = None,
) -> SimulationOutcome:
    """`write` gets every line of the event log. `watch` gets a function that returns the progress, and None at the end.
    Raises AssertionError for a broken invariant, the BatonError of a worker that never starts, Misconfigured for a
    fault with an impossible target, and Interrupted."""
    check(faults, config)
    loop = VirtualLoop(seed=config.seed)
    event_log = SimulationLog(loop, write)
    try:
        return run_virtually(_run(loop, event_log, config, sessions, faults, watch, steer), loop=loop)
    except KeyboardInterrupt:
        raise Interrupted(event_log.over_s) from None
    finally:
        if watch is not None:
            watch(None)


async def _run(
    loop: VirtualLoop,
    event_log: SimulationLog,
    config: SimulationConfig,
    sessions: Sequence[UserSession],
    faults: Sequence[Fault],
    watch: Callable[[Look | None], object] | None,
    steer: Steer | None,
) -> SimulationOutcome:
    deployment = SimulatedDeployment(config, event_log, untroubled=not faults and steer is None)
    clients = Clients(deployment, event_log, seed=config.seed)
    invariants = Invariants(deployment, clients, forgetful=any(fault.kind is Kind.INDEX_LOST for fault in faults))
    loop.after = deployment.assert_no_faults
    if watch is not None:
        watch(partial(_progress, deployment, clients, event_log))
    try:
        await deployment.start()
    finally:  # also logs the events of a cluster that does not start
        event_log.begin()
    loop.after = invariants.after_event
    last_s, start_s = max(session.due_s for session in sessions), loop.time()
    timeline = SimulationTimeline(deployment, period_s=last_s / NUM_SAMPLES + 0.1)
    trouble = Trouble(deployment, clients, seed=config.seed)
    async with asyncio.TaskGroup() as group:
        beside = [group.create_task(timeline.run(), name="timeline")]
        if steer is not None:
            beside.append(group.create_task(steer(deployment), name="steering"))
        group.create_task(trouble.run(faults), name="faults")
        await clients.run(sessions)
        trouble.over()
        duration_s = loop.time() - start_s
        for task in beside:
            task.cancel()
    if steer is not None:
        await deployment.ready()
    await invariants.when_idle()
    loop.after = None
    await deployment.stop()
    return SimulationOutcome(
        config=config,
        records=sorted(clients.records, key=lambda record: record.index),
        num_not_asked=sum(len(session.turns) for session in sessions) - len(clients.records),
        fingerprint=event_log.fingerprint,
        num_events=event_log.num_events,
        num_callbacks=loop.num_callbacks,
        duration_s=duration_s,
        served=deployment.served,
        itl_s=deployment.gaps.spread(),
        samples=timeline.samples,
        num_handed_over=clients.num_handed_over,
        transfer_bytes=deployment.lanes.num_bytes,
        faults=trouble.happened,
        failures=clients.failures,
    )


def _progress(deployment: SimulatedDeployment, clients: Clients, event_log: SimulationLog) -> tuple[int, str]:
    if event_log.at_s is None:
        num_workers = len(deployment.config.pools.worker_ids())
        return 0, f"{deployment.num_made:,} of {num_workers:,} workers made"
    return len(clients.records), f"{event_log.at_s:,.0f} s of virtual time"
