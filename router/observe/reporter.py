"""Reports to the owner of the fleet what this gateway's clients saw, as often as the owner wants it.

news = await owner.report(sight, or None while no one needs it) ─▶ wait news.period_s ─▶ again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from protos.errors import BatonError
from protos.event_loop import loop_time
from router.fleet_owner import CapacityNews, CapacityOwner, GatewaySight, NoFleetOwner
from router.jobs import FleetView
from router.observe.history import WaitingLine
from router.observe.samples import RequestSamples, sample_of, sight_of
from router.traces.request_trace import RequestTraces

log = logging.getLogger("baton.router")

RETRY_S = 5.0
_MAX_OPEN = 1024


class CapacityReporter(Collector):
    """`run` lasts until it is cancelled. Its metric is the desired fleet, as the owner reported it last."""

    def __init__(
        self,
        gateway_id: str,
        owner: CapacityOwner,
        samples: RequestSamples,
        registry: CollectorRegistry,
        *,
        records: RequestTraces,
        fleet: FleetView,
        line: WaitingLine,
    ) -> None:
        self._gateway_id = gateway_id
        self._owner = owner
        self._samples = samples
        self._records, self._fleet, self._line = records, fleet, line
        self._news: CapacityNews | None = None
        registry.register(self)

    async def run(self) -> None:
        pause_s = 0.0 if not isinstance(self._owner, NoFleetOwner) else None
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self.report()

    async def report(self) -> float:
        """Returns the seconds until the next report."""
        try:
            sight = self._sight() if self._samples.window_s else None
            news = self._news = await self._owner.report(sight)
        except BatonError as error:
            log.debug("the owner of the fleet takes no report: %s", error.message)
            return RETRY_S
        except Exception:  # without reports the fleet would never shrink
            log.exception("no report to the owner of the fleet: internal error")
            return RETRY_S
        if news.window_s != self._samples.window_s:
            self._samples.watch(news.window_s)
        return news.period_s

    def collect(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily(
            "baton_desired_workers", "Workers that there should be, by pool: for alerts, KEDA and HPA", labels=["pool"]
        )
        for role, count in (self._news.desired if self._news is not None else {}).items():
            gauge.add_metric([role], count)
        yield gauge

    def describe(self) -> Sequence[Metric]:
        return ()

    def _sight(self) -> GatewaySight:
        now, samples, recent = loop_time(), self._samples, self._records.recent(_MAX_OPEN)
        running = [sample_of(trace) for trace in recent if trace.timestamps.ended_s is None]
        return sight_of(
            self._gateway_id, [*samples.latest(now), *running], self._fleet.status(), now=now,
            covered_s=samples.covered_s(now), num_arrived=samples.num_arrived(now),
            num_waiting=self._line.num_waiting,
        )  # fmt: skip
