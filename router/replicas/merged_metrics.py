"""/metrics of several gateway processes as one page.

Metrics that a process counts itself are shown by process (label `process`): the counter of a restarted process begins
at zero, which Prometheus takes for a reset only in a series of its own. Metrics that workers report are the same in
every process, and shown once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

POOL, WORKER = "baton_pool_", "baton_worker_"
_NAN = float("nan")  # JSON has none
COUNTED_HERE = frozenset(f"{POOL}{name}" for name in ("prompt_tokens", "prefix_hit_tokens", "pauses"))
"""Series about pools that a gateway counts itself."""

Families = Sequence[Sequence[Any]]
"""Name, documentation, type and samples (name, labels, value) of each, as JSON has them."""


def families_of(registry: CollectorRegistry) -> Families:
    return [
        [metric.name, metric.documentation, metric.type, [[one.name, one.labels, one.value] for one in metric.samples]]
        for metric in registry.collect()
    ]


class Merged(Collector):
    """Merges the scrapes of all processes, by number."""

    def __init__(self, told: Mapping[int, Families]) -> None:
        self._told = told

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        greatest: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
        for number, families in sorted(self._told.items()):
            for name, documentation, kind, samples in families:
                metric = merged.setdefault(name, Metric(name, documentation, kind))
                for series, labels, value in samples:
                    if heard_of_workers(name):
                        key = (name, series, tuple(sorted(labels.items())))
                        greatest[key] = max(value, greatest.get(key, value))
                    else:
                        metric.add_sample(series, labels | {"process": str(number)}, _NAN if value is None else value)
        for (name, series, pairs), value in greatest.items():
            merged[name].add_sample(series, dict(pairs), value)
        return merged.values()


def heard_of_workers(name: str) -> bool:
    return name.startswith((POOL, WORKER)) and name not in COUNTED_HERE
