"""The last hour of a gateway: a point every 10 s, read from the counters of its process when a period ends. Nothing is
done for a request. Periods begin at multiples of `PERIOD_S` of the wall clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client.registry import Collector

from protos.event_loop import loop_time
from protos.values import WorkerRole
from router.jobs import FleetView
from router.request_metrics import GAP_SECONDS, SECONDS, RequestMetrics

PERIOD_S = 10
NUM_PERIODS = 3600 // PERIOD_S
HERE = ("ready", "draining")

Point = dict[str, Any]
"""A period as /admin/history shows it. `at`: its end, seconds since 1970. A figure without a measurement is None."""


class History:
    """The ring of one gateway process, written and read on its event loop."""

    def __init__(self) -> None:
        self._ring: deque[Point] = deque(maxlen=NUM_PERIODS)

    @property
    def last_at(self) -> int:
        return self._ring[-1]["at"] if self._ring else 0

    def add(self, point: Point) -> None:
        assert point["at"] > self.last_at, "periods are added in their order"
        self._ring.append(point)

    def since(self, at: int) -> Sequence[Point]:
        return [point for point in self._ring if point["at"] > at]


class WaitingLine(Protocol):
    """The requests in line at the gateway."""

    @property
    def num_waiting(self) -> int: ...


class Counts(NamedTuple):
    """Counts since the start of a gateway process. `totals`: requests, output tokens, prompt tokens, cached ones."""

    read_s: float  # by the event loop's clock
    ttft: Sequence[int]
    gaps: Sequence[int]
    totals: Sequence[int]


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
        before, counts = self._before, self._read()
        self._before, passed_s = counts, max(counts.read_s - before.read_s, 1e-3)
        ttft, gaps = _less(counts.ttft, before.ttft), _less(counts.gaps, before.gaps)
        requests, output, prompt, cached = _less(counts.totals, before.totals)
        workers = [worker for worker in self._fleet.status() if worker.info is not None and worker.state in HERE]
        pools = {
            role.value: members
            for role in WorkerRole
            if (members := [worker for worker in workers if worker.info is not None and worker.info.role is role])
        }
        kv = {
            pool: (
                sum(m.load.num_blocks - m.load.num_free_blocks for m in members),
                sum(m.load.num_blocks for m in members),
            )
            for pool, members in pools.items()
        }
        self._history.add(
            {
                "at": at,
                "ttft_p50_s": quantile(SECONDS, ttft, 0.5),
                "ttft_p95_s": quantile(SECONDS, ttft, 0.95),
                "tpot_p50_s": quantile(GAP_SECONDS, gaps, 0.5),
                "tpot_p95_s": quantile(GAP_SECONDS, gaps, 0.95),
                "requests_per_s": requests / passed_s,
                "output_tokens_per_s": output / passed_s,
                "prompt_tokens_per_s": prompt / passed_s,
                "hit_rate": cached / prompt if prompt else None,
                "waiting": self._line.num_waiting,
                "worker_waiting": sum(worker.load.num_waiting for worker in workers),
                "in_flight": _total(self._metrics.in_flight),
                "kv_use": {pool: used / whole for pool, (used, whole) in kv.items() if whole},
                "ready": {pool: sum(m.state == "ready" for m in members) for pool, members in pools.items()},
            }
        )

    def _read(self) -> Counts:
        metrics = self._metrics
        counted = (metrics.requests, metrics.generated_tokens, metrics.prompt_tokens, metrics.cached_tokens)
        ttft, gaps = _buckets(metrics.ttft, SECONDS), _buckets(metrics.gaps, GAP_SECONDS)
        return Counts(loop_time(), ttft, gaps, [_total(metric) for metric in counted])


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Interpolates within a bucket as Prometheus's histogram_quantile does. `bounds` are the buckets' upper ends. None
    if nothing was counted."""
    rank, below, low = part * sum(counts), 0.0, 0.0
    if not rank:
        return None
    for high, count in zip(bounds, counts, strict=False):
        if below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below, low = below + count, high
    return bounds[-1]


def _less(counts: Sequence[int], before: Sequence[int]) -> Sequence[int]:
    return [now - earlier for now, earlier in zip(counts, before, strict=True)]


def _total(metric: Collector) -> int:
    return int(sum(sample.value for family in metric.collect() for sample in family.samples))


def _buckets(metric: Collector, bounds: Sequence[float]) -> Sequence[int]:
    up_to = dict.fromkeys((*bounds, math.inf), 0.0)  # a metric without requests for a label has no series
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                up_to[float(sample.labels["le"])] += sample.value
    cumulative = [int(count) for count in up_to.values()]
    return [count - below for count, below in zip(cumulative, [0, *cumulative], strict=False)]
