"""One run from its configuration to what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.bench.report import Record
from cluster.simulate.chronicle import Chronicle
from cluster.simulate.client import Clients
from cluster.simulate.clock import VirtualLoop, run_virtually
from cluster.simulate.config import SimulationConfig
from cluster.simulate.deployment import Deployment
from cluster.simulate.workload import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`fingerprint` is the hash of the event log: equal for equal seeds and configurations."""

    config: SimulationConfig
    records: Sequence[Record]
    fingerprint: str
    num_events: int
    num_callbacks: int
    duration_s: float
    gpu_s: float


def simulate(
    config: SimulationConfig, sessions: Sequence[Session], *, write: Callable[[str], object] | None = None
) -> Outcome:
    """Raises AssertionError when an invariant breaks, and the BatonError of a worker that never starts."""
    loop = VirtualLoop(seed=config.seed)

    async def main() -> Outcome:
        chronicle = Chronicle(write)
        deployment = Deployment(config, chronicle)
        await deployment.start()
        start_s = loop.time()
        clients = Clients(deployment, chronicle, seed=config.seed)
        await clients.run(sessions)
        duration_s = loop.time() - start_s
        await deployment.stop()
        return Outcome(
            config=config,
            records=sorted(clients.records, key=lambda record: record.index),
            fingerprint=chronicle.fingerprint,
            num_events=chronicle.num_events,
            num_callbacks=loop.num_callbacks,
            duration_s=duration_s,
            gpu_s=deployment.gpu_s,
        )

    return run_virtually(main(), loop=loop)
