"""Prometheus metrics of the workers' lanes, by pool, transport and the reason against a faster one. Removed workers
count, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protos.values import LaneLoad, WorkerLoad, WorkerRole

_LABELS = ("pool", "transport", "reason")
_COUNTED = {
    "opened": "Lanes opened",
    "lost": "Lanes lost",
    "stuck": "Lanes lost because nothing moved on them",
    "corrupt": "Lanes lost because a checksum was wrong",
}
Key = tuple[str, str, str]


class LaneTotals:
    """Totals of all lanes since the gateway's start."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[Key]] = {what: Counter() for what in _COUNTED}

    def note(self, role: WorkerRole, before: WorkerLoad, now: WorkerLoad) -> None:
        """Adds the traffic of a worker's lanes between two of its messages."""
        if not now.lanes or now.lanes == before.lanes:
            return
        known = {(lane.transport, lane.reason): lane for lane in before.lanes}
        for lane in now.lanes:
            was = known.get((lane.transport, lane.reason))
            for what, counts in self._counts.items():
                grown = _number(lane, what) - (_number(was, what) if was else 0)
                counts[role, lane.transport, lane.reason] += max(0, grown)

    def metrics(self, loads: Mapping[WorkerRole, Sequence[WorkerLoad]]) -> Iterable[Metric]:
        """The metrics of all lanes. `loads` are those of the present workers."""
        lanes = [(role, lane) for role, of_role in loads.items() for load in of_role for lane in load.lanes]
        num_open: Counter[Key] = Counter()
        for role, lane in lanes:
            num_open[role, lane.transport, lane.reason] += lane.num_open
        gauge = GaugeMetricFamily("baton_pool_lanes", "Lanes that are open", labels=_LABELS)
        for key, count in num_open.items():
            gauge.add_metric(key, count)
        yield gauge
        for what, documentation in _COUNTED.items():
            counter = CounterMetricFamily(f"baton_pool_lanes_{what}", documentation, labels=_LABELS)
            for key, count in self._counts[what].items():
                counter.add_metric(key, count)
            yield counter


def _number(lane: LaneLoad, what: str) -> int:
    return int(getattr(lane, f"num_{what}"))
