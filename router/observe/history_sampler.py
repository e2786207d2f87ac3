"""Reads the counters of a gateway process at the end of every period: nothing is done for a request."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.registry import Collector

from protos.event_loop import loop_time
from protos.values import WorkerRole
from router.jobs import FleetView
from router.observe.history import PERIOD_S, History, HistoryPeriod
from router.request_metrics import GAP_SECONDS, SECONDS, RequestMetrics

HERE = ("ready", "draining")


class WaitingLine(Protocol):
    """The requests in line at the gateway."""

    @property
    def num_waiting(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The totals of a gateway process since its start; `read_s` by the event loop's clock."""

    read_s: float
    ttft: Sequence[int]
    gaps: Sequence[int]
    requests: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


class HistorySampler:
    """Fills `history` from the metrics of this process, from `start` to `close` on the gateway's event loop."""

    def __init__(self, history: History, *, metrics: RequestMetrics, fleet: FleetView, line: WaitingLine) -> None:
        self._history = history
        self._metrics = metrics
        self._fleet = fleet
        self._line = line
        self._before = self._read()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="history")

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S - time.time() % PERIOD_S)
            self.sample(time.time())

    def sample(self, now: float) -> None:
        """Ends a period at `now`, by the wall clock. If that was set back, a period waits until it has caught up."""
        at = round(now / PERIOD_S) * PERIOD_S
        if at <= self._history.last_at:
            return
        before, counted = self._before, self._read()
        passed_s = max(counted.read_s - before.read_s, 1e-3)
        workers = [worker for worker in self._fleet.status() if worker.info is not None and worker.state in HERE]
        pools = {
            role: [worker for worker in workers if worker.info is not None and worker.info.role is role]
            for role in WorkerRole
        }
        pools = {role: members for role, members in pools.items() if members}
        self._before = counted
        self._history.add(
            HistoryPeriod(
                at=at,
                ttft=_less(counted.ttft, before.ttft),
                gaps=_less(counted.gaps, before.gaps),
                requests=(counted.requests - before.requests) / passed_s,
                output_tokens=(counted.output_tokens - before.output_tokens) / passed_s,
                prompt_tokens=(counted.prompt_tokens - before.prompt_tokens) / passed_s,
                prompt=counted.prompt_tokens - before.prompt_tokens,
                cached=counted.cached_tokens - before.cached_tokens,
                waiting=self._line.num_waiting,
                in_flight=_total(self._metrics.in_flight),
                worker_waiting=sum(worker.load.num_waiting for worker in workers),
                kv={
                    role.value: (
                        sum(worker.load.num_blocks - worker.load.num_free_blocks for worker in members),
                        sum(worker.load.num_blocks for worker in members),
                    )
                    for role, members in pools.items()
                },
                ready={
                    role.value: sum(worker.state == "ready" for worker in members) for role, members in pools.items()
                },
            )
        )

    def _read(self) -> Counters:
        metrics = self._metrics
        return Counters(
            read_s=loop_time(),
            ttft=_buckets(metrics.ttft, SECONDS),
            gaps=_buckets(metrics.gaps, GAP_SECONDS),
            requests=_total(metrics.requests),
            output_tokens=_total(metrics.generated_tokens),
            prompt_tokens=_total(metrics.prompt_tokens),
            cached_tokens=_total(metrics.cached_tokens),
        )


def _less(counts: Sequence[int], before: Sequence[int]) -> Sequence[int]:
    return [now - earlier for now, earlier in zip(counts, before, strict=True)]


def _total(metric: Collector) -> int:
    return int(sum(sample.value for family in metric.collect() for sample in family.samples))


def _buckets(metric: Collector, bounds: Sequence[float]) -> Sequence[int]:
    up_to = dict.fromkeys((*bounds, math.inf), 0.0)  # a metric whose labels no request has had has no series
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                up_to[float(sample.labels["le"])] += sample.value
    cumulative = [int(count) for count in up_to.values()]
    return [count - below for count, below in zip(cumulative, [0, *cumulative], strict=False)]
