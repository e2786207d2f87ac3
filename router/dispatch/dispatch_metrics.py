"""Prometheus metrics of migrations, pulls and the parity canary."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch.canary import Canary
from router.dispatch.migration import Migrations
from router.dispatch.prefix_pull import PrefixPulls


class MigrationCollector(Collector):
    """Series `baton_moves_total{outcome}`, `baton_pulled_blocks_total`, `baton_pull_failures_total{reason}` and
    `baton_canary_total{outcome}`. They are read at every scrape."""

    def __init__(self, moves: Migrations, pulls: PrefixPulls, canary: Canary) -> None:
        self._moves = moves
        self._pulls = pulls
        self._canary = canary

    def collect(self) -> Iterable[Metric]:
        moves = CounterMetricFamily(
            "baton_moves", "Running sequences that were to go on elsewhere with their KV", labels=("outcome",)
        )
        moves.add_metric(("moved",), self._moves.num_moved)
        moves.add_metric(("stayed",), self._moves.num_stayed)
        yield moves
        yield CounterMetricFamily(
            "baton_pulled_blocks", "Cached KV blocks fetched from another worker", value=self._pulls.num_blocks
        )
        failures = CounterMetricFamily("baton_pull_failures", "Pulls that came to nothing", labels=("reason",))
        for reason, count in self._pulls.failures.items():
            failures.add_metric((reason,), count)
        yield failures
        canary = CounterMetricFamily(
            "baton_canary", "Greedy requests run a second time, on one worker alone", labels=("outcome",)
        )
        for outcome, count in self._canary.outcomes.items():
            canary.add_metric((outcome,), count)
        yield canary
