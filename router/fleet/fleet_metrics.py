"""Prometheus metrics of the fleet by pool, read from the fleet at every scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.values import WorkerLoad, WorkerRole
from router.fleet.fleet import Fleet
from router.fleet.member import WorkerState, WorkerStatus
from router.fleet.pool_totals import PoolTotals

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
    ("prompt_tokens", "Prompt tokens of jobs that this pool computed", lambda totals: totals.num_prompt_tokens),
    ("prefix_hit_tokens", "Of those, found in its prefix cache", lambda totals: totals.num_cached_tokens),
    ("output_tokens", "Tokens that this pool reported to all gateways", lambda totals: totals.num_output_tokens),
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


HERE = (WorkerState.READY, WorkerState.DRAINING)
MAX_WORKERS = 64
WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("running", "Requests in the worker's batch", lambda worker: worker.load.num_running),
    ("waiting", "Requests waiting for a place in its batch", lambda worker: worker.load.num_waiting),
    (
        "queued_prefill_tokens",
        "Prompt tokens waiting to be read by it",
        lambda worker: worker.load.queued_prefill_tokens,
    ),
    ("kv_blocks", "KV blocks it has", lambda worker: worker.load.num_blocks),
    (
        "kv_blocks_used",
        "KV blocks in use, without cached ones that may be evicted",
        lambda worker: worker.load.num_blocks - worker.load.num_free_blocks,
    ),
    (
        "expert_imbalance",
        "Tokens of its most popular expert over the mean of the layer, in the worst layer; 0 without experts",
        lambda worker: worker.load.expert_imbalance,
    ),
    (
        "expert_rank_imbalance",
        "The same of ranks that have whole experts; 0 where they share every expert",
        lambda worker: worker.load.expert_rank_imbalance,
    ),
    (
        "expert_placed_imbalance",
        "That of ranks if each had room for one more expert, and experts were placed by their loads",
        lambda worker: worker.load.expert_placed_imbalance,
    ),
    ("kv_blocks_cached", "KV blocks in its prefix cache", lambda worker: worker.num_cached_blocks),
)


class FleetCollector(Collector):
    """Register it with the registry that /metrics shows. Series are named `baton_pool_...` and labelled `pool`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        status = self._fleet.status()
        pools: dict[WorkerRole, list[WorkerLoad]] = {role: [] for role in WorkerRole}
        for worker in status:
            if worker.info is not None and worker.state in HERE:
                pools[worker.info.role].append(worker.load)
        for name, documentation, value_of in GAUGES:
            gauge = GaugeMetricFamily(f"baton_pool_{name}", documentation, labels=("pool",))
            for role, loads in pools.items():
                gauge.add_metric((role,), sum(value_of(load) for load in loads))
            yield gauge
        for name, documentation, total_of in COUNTERS:
            counter = CounterMetricFamily(f"baton_pool_{name}", documentation, labels=("pool",))
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
        yield from _by_worker(status)
        yield from self._fleet.lane_totals.metrics(pools)
        yield from self._fleet.host_totals.metrics(pools)
        yield from self._fleet.speculation_totals.metrics(pools)
        yield from self._fleet.lora.metrics()


def _by_worker(status: Sequence[WorkerStatus]) -> Iterable[Metric]:
    """Metrics of single workers, for `MAX_WORKERS` of them: the number of series must stay bounded in a large
    cluster."""
    listed = sorted((one for one in status if one.info is not None), key=lambda one: one.worker_id)[:MAX_WORKERS]
    yield GaugeMetricFamily(
        "baton_worker_unlisted", "Workers beyond those that have series of their own", len(status) - len(listed)
    )
    ready = GaugeMetricFamily("baton_worker_ready", "1 while the worker takes work", labels=("worker", "pool"))
    families = [
        GaugeMetricFamily(f"baton_worker_{name}", text, labels=("worker", "pool")) for name, text, _ in WORKER_GAUGES
    ]
    for worker in listed:
        assert worker.info is not None
        labels, here = (worker.worker_id, worker.info.role), worker.state in HERE
        ready.add_metric(labels, float(worker.state == WorkerState.READY))
        for family, (_, _, value_of) in zip(families, WORKER_GAUGES, strict=True):
            family.add_metric(labels, value_of(worker) if here else 0.0)
    yield from (ready, *families)
