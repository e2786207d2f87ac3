"""Prometheus metrics of host tiers by pool: their hits and their transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protos.values import HostLoad, WorkerLoad, WorkerRole

NOTHING = HostLoad()

COUNTERS: tuple[tuple[str, str, Callable[[HostLoad], float]], ...] = (
    ("hit_tokens", "Prompt tokens loaded from host memory, not computed", lambda host: host.num_hit_tokens),
    (
        "passed_tokens",
        "Prompt tokens in host memory that were computed, since that took less",
        lambda host: host.num_passed_tokens,
    ),
    ("stored_blocks", "KV blocks copied to host memory", lambda host: host.num_stored),
    ("evicted_blocks", "KV blocks dropped from host memory", lambda host: host.num_evicted),
    ("loaded_bytes", "KV bytes loaded from host memory", lambda host: host.loaded_bytes),
    ("load_seconds", "Seconds that took", lambda host: host.load_s),
)


class HostTotals:
    """Totals of a pool's workers, removed ones included, since the router's start. They only grow."""

    def __init__(self) -> None:
        self._totals = {role: dict.fromkeys([name for name, _, _ in COUNTERS], 0.0) for role in WorkerRole}

    def note(self, role: WorkerRole, before: WorkerLoad, after: WorkerLoad) -> None:
        """Adds the difference between two reports of a worker."""
        if after.host is not None:
            for name, _, value_of in COUNTERS:
                self._totals[role][name] += max(0.0, value_of(after.host) - value_of(before.host or NOTHING))

    def metrics(self, pools: Mapping[WorkerRole, Sequence[WorkerLoad]]) -> Iterable[Metric]:
        """The metrics of all pools. `pools` contains the loads of the present workers."""
        room = GaugeMetricFamily("baton_pool_host_kv_blocks", "KV blocks host memory has room for", labels=("pool",))
        used = GaugeMetricFamily("baton_pool_host_kv_blocks_used", "KV blocks in host memory", labels=("pool",))
        for role, loads in pools.items():
            room.add_metric((role,), sum(load.host.num_blocks for load in loads if load.host is not None))
            used.add_metric((role,), sum(load.host.num_used for load in loads if load.host is not None))
        yield from (room, used)
        for name, documentation, _ in COUNTERS:
            counter = CounterMetricFamily(f"baton_pool_host_{name}", documentation, labels=("pool",))
            for role, totals in self._totals.items():
                counter.add_metric((role,), totals[name])
            yield counter
