"""Prometheus metrics of admission, read at each scrape from the counts that admission keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission


class AdmissionCollector(Collector):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "baton_admission_waiting", "Requests in line at the gateway", value=self._admission.num_waiting
        )
        refused = CounterMetricFamily("baton_admission_refused", "Requests refused, by reason", labels=("reason",))
        for reason, count in asdict(self._admission.refused).items():
            refused.add_metric((reason,), count)
        yield refused
