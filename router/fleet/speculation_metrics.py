"""Prometheus metrics of speculation by pool: drafts by source and position, and the seconds that they spared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protos.values import SpeculationLoad, WorkerLoad, WorkerRole

NOTHING = SpeculationLoad()
_COUNTERS = (
    ("rows", "num_rows", "Rows of sequences that may speculate, in all steps"),
    ("tokens", "num_tokens", "Tokens that these rows brought"),
    ("spared_seconds", "spared_s", "Seconds of steps that accepted drafts spared"),
    ("spent_seconds", "spent_s", "Seconds by which steps with drafts were longer, and of the proposers' models"),
)
_BY_POSITION = (
    ("drafted", "drafted_at", "Drafted tokens that were verified, by their position in a draft, from 1 on"),
    ("accepted", "accepted_at", "Of those, accepted ones"),
)


class SpeculationTotals:
    """Totals of a pool's workers, removed ones included, since the router's start. They only grow."""

    def __init__(self) -> None:
        self._totals = {(role, name): 0.0 for role in WorkerRole for name, _, _ in _COUNTERS}
        self._by_position: Counter[tuple[str, WorkerRole, str, int]] = Counter()

    def note(self, role: WorkerRole, before: WorkerLoad, after: WorkerLoad) -> None:
        """Adds the difference between two reports of a worker."""
        old, new = before.speculation or NOTHING, after.speculation or NOTHING
        if new.num_rows == old.num_rows:
            return
        if new.num_rows < old.num_rows:  # a new process
            old = NOTHING
        for name, field, _ in _COUNTERS:
            self._totals[role, name] += max(0, getattr(new, field) - getattr(old, field))
        if new.sources == old.sources:
            return
        known = {one.source: one for one in old.sources}
        for one in new.sources:
            earlier = known.get(one.source)
            for name, field, _ in _BY_POSITION:
                counts = getattr(one, field)
                past = getattr(earlier, field) if earlier is not None else ()
                for place, count in enumerate(counts):
                    more = count - (past[place] if place < len(past) else 0)
                    if more > 0:
                        self._by_position[name, role, one.source, place + 1] += more

    def metrics(self, pools: Mapping[WorkerRole, Sequence[WorkerLoad]]) -> Iterable[Metric]:
        """`pools`: the latest loads of the workers that are there."""
        paused = GaugeMetricFamily(
            "baton_pool_speculation_paused",
            "Workers on which drafts did not pay and are paused",
            labels=("pool", "source"),
        )
        counts = Counter(
            (role, one.source)
            for role, loads in pools.items()
            for load in loads
            for one in (load.speculation or NOTHING).paused
        )
        for (role, source), count in counts.items():
            paused.add_metric((role, source), count)
        yield paused
        for name, _, documentation in _COUNTERS:
            counter = CounterMetricFamily(f"baton_pool_speculation_{name}", documentation, labels=("pool",))
            for role in WorkerRole:
                counter.add_metric((role,), self._totals[role, name])
            yield counter
        for name, _, documentation in _BY_POSITION:
            labels = ("pool", "source", "position")
            counter = CounterMetricFamily(f"baton_pool_speculation_{name}", documentation, labels=labels)
            for (kind, role, source, position), count in self._by_position.items():
                if kind == name:
                    counter.add_metric((role, source, str(position)), count)
            yield counter
