"""/metrics of several gateway processes as one page.

What a process counts by itself is told by process (label `process`): a counter of one that was started again begins at
zero, and only as a series of its own is that a reset and not a loss. What workers say is heard by every process alike,
and told once.
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
"""Of the series about pools, those that a gateway counts of what went through it."""

Families = Sequence[Sequence[Any]]
"""Name, documentation, type and samples (name, labels, value) of each, as JSON has them."""


def families_of(registry: CollectorRegistry) -> Families:
    return [
        [metric.name, metric.documentation, metric.type, [[one.name, one.labels, one.value] for one in metric.samples]]
        for metric in registry.collect()
    ]


class Merged(Collector):
    """What a scrape of the processes, by number, comes to."""

    def __init__(self, told: Mapping[int, Families]) -> None:
        self._told = told

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        heard: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
        for number, families in sorted(self._told.items()):
            for name, documentation, kind, samples in families:
                metric = merged.setdefault(name, Metric(name, documentation, kind))
                for series, labels, value in samples:
                    if heard_of_workers(name):
                        key = (name, series, tuple(sorted(labels.items())))
                        heard[key] = max(value, heard.get(key, value))
                    else:
                        metric.add_sample(series, labels | {"process": str(number)}, _NAN if value is None else value)
        for (name, series, pairs), value in heard.items():
            merged[name].add_sample(series, dict(pairs), value)
        return merged.values()


def heard_of_workers(name: str) -> bool:
    return name.startswith((POOL, WORKER)) and name not in COUNTED_HERE
