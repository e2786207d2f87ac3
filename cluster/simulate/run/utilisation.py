"""Utilisation of the pools over a run, in samples."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster.simulate.run.deployment import SimulatedDeployment
from protos.values import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSample:
    """Sums over a pool's workers. `num_queued`: at the gateways, for any pool. `num_moved_bytes`: so far."""

    at_s: float
    role: WorkerRole
    num_workers: int
    num_running: int
    num_waiting: int
    num_queued: int
    num_moved_bytes: int
    blocks_used: float


class SimulationTimeline:
    def __init__(self, deployment: SimulatedDeployment, *, period_s: float) -> None:
        self.samples: list[TimelineSample] = []
        self._deployment = deployment
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        start_s = self._loop.time()
        while True:
            self._take(self._loop.time() - start_s)
            await asyncio.sleep(self._period_s)

    def _take(self, at_s: float) -> None:
        deployment = self._deployment
        num_queued = sum(gateway.admission.num_waiting for gateway in deployment.gateways)
        for role in sorted({plan.role for plan in deployment.plans}):
            engines = [worker.engine for worker in deployment.workers.values() if worker.info.role is role]
            pools = [engine.pool for engine in engines]
            num_used = sum(pool.num_blocks - pool.num_free for pool in pools)
            self.samples.append(
                TimelineSample(
                    at_s=at_s,
                    role=role,
                    num_workers=len(engines),
                    num_running=sum(engine.scheduler.num_running for engine in engines),
                    num_waiting=sum(engine.scheduler.num_waiting for engine in engines),
                    num_queued=num_queued,
                    num_moved_bytes=deployment.lanes.num_bytes,
                    blocks_used=num_used / max(1, sum(pool.num_blocks for pool in pools)),
                )
            )
