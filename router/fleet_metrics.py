"""The fleet as Prometheus sees it, by pool. Read from the fleet at every scrape: nothing is counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.values import WorkerLoad, WorkerRole
from router.fleet import Fleet, PoolTotals
from router.member import WorkerState

GAUGES: tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...] = (
    ("running", "Requests in the workers' batches", lambda load: load.num_running),
    ("waiting", "Requests waiting for a place in a batch", lambda load: load.num_waiting),
    ("queued_prefill_tokens", "Prompt tokens waiting to be read", lambda load: load.queued_prefill_tokens),
    ("kv_blocks", "KV blocks there are", lambda load: load.num_blocks),
    ("kv_blocks_used", "KV blocks in use, without cached ones that may be evicted",
     lambda load: load.num_blocks - load.num_free_blocks),
    ("tickets", "Reservations that wait for KV", lambda load: load.num_tickets),
)  # fmt: skip

COUNTERS: tuple[tuple[str, str, Callable[[PoolTotals], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of jobs read in this pool", lambda totals: totals.num_prompt_tokens),
    ("prefix_hit_tokens", "Of those, found in the reader's prefix cache", lambda totals: totals.num_cached_tokens),
    ("transfer_bytes", "KV bytes sent or received", lambda totals: totals.transfer_bytes),
    ("transfer_seconds", "Seconds KV spent on its way", lambda totals: totals.transfer_s),
    (
        "transfer_hidden_seconds",
        "Of those, seconds in which its prompt was still being computed",
        lambda totals: totals.transfer_hidden_s,
    ),
    ("losses", "Times a worker that was ready was lost", lambda totals: totals.num_losses),
    ("pauses", "Times a worker that kept failing was kept away from", lambda totals: totals.num_pauses),
)


class FleetCollector(Collector):
    """Register it with the registry that /metrics shows. Series are named `baton_pool_...` and labelled `pool`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        status = self._fleet.status()
        pools: dict[WorkerRole, list[WorkerLoad]] = {role: [] for role in WorkerRole}
        for worker in status:
            if worker.info is not None and worker.state in (WorkerState.READY, WorkerState.DRAINING):
                pools[worker.info.role].append(worker.load)
        for name, told, value_of in GAUGES:
            gauge = GaugeMetricFamily(f"baton_pool_{name}", told, labels=("pool",))
            for role, loads in pools.items():
                gauge.add_metric((role,), sum(value_of(load) for load in loads))
            yield gauge
        for name, told, total_of in COUNTERS:
            counter = CounterMetricFamily(f"baton_pool_{name}", told, labels=("pool",))
            for role, totals in self._fleet.totals.items():
                counter.add_metric((role,), total_of(totals))
            yield counter
        workers = GaugeMetricFamily("baton_pool_workers", "Workers by state", labels=("pool", "state"))
        counts = Counter((w.info.role if w.info else "unknown", w.state) for w in status)
        for role in WorkerRole:
            for state in WorkerState:
                workers.add_metric((role, state), counts.pop((role, state), 0))
        for (pool, state), count in counts.items():
            workers.add_metric((pool, state), count)
        yield workers
        yield GaugeMetricFamily(
            "baton_index_shared", "0 while a prefix index in Redis is not reached", float(self._fleet.shares_index)
        )
        yield from self._fleet.lane_totals.metrics(pools)
        yield from self._fleet.host_totals.metrics(pools)

    def describe(self) -> Iterable[Metric]:
        return self.collect()
