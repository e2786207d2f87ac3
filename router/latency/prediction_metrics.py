"""Prometheus metrics of prediction errors and of shadow policies, computed at every scrape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.latency.predictor import Predictor
from router.traces.shadow import ShadowPolicy

PREDICTED = ("ttft", "tpot")


class PredictionCollector(Collector):
    """Series `baton_prediction_...`, labelled by worker and predicted time, and `baton_shadow_...`, labelled by
    policy."""

    def __init__(self, predictor: Predictor, shadows: Sequence[ShadowPolicy] = ()) -> None:
        self._predictor = predictor
        self._shadows = shadows

    def collect(self) -> Iterable[Metric]:
        yield from self._errors()
        if self._shadows:
            yield from self._compared()

    def _errors(self) -> Iterable[Metric]:
        labels = ("worker", "what")
        error = GaugeMetricFamily(
            "baton_prediction_error_seconds", "Absolute difference of measured and predicted, lately", labels=labels
        )
        bias = GaugeMetricFamily("baton_prediction_bias_seconds", "Measured less predicted, lately", labels=labels)
        count = CounterMetricFamily("baton_predictions", "Predictions that were measured", labels=labels)
        for worker, both in self._predictor.errors().items():
            for what, errors in zip(PREDICTED, both, strict=True):
                error.add_metric((worker, what), errors.mean_s)
                bias.add_metric((worker, what), errors.bias_s)
                count.add_metric((worker, what), errors.num_observed)
        yield from (error, bias, count)

    def _compared(self) -> Iterable[Metric]:
        labels = ("policy",)
        decisions = CounterMetricFamily("baton_shadow_decisions", "Requests a shadow policy scored", labels=labels)
        agreed = CounterMetricFamily("baton_shadow_agreements", "Of those, with the same choice", labels=labels)
        ttft = GaugeMetricFamily(
            "baton_shadow_ttft_difference_seconds", "Its predicted less the taken choice's, mean", labels=labels
        )
        hits = GaugeMetricFamily(
            "baton_shadow_hit_difference_ratio", "Its hit rate less the taken choices'", labels=labels
        )
        for shadow in self._shadows:
            tally, name = shadow.tally, (shadow.name,)
            decisions.add_metric(name, tally.num_decisions)
            agreed.add_metric(name, tally.num_agreed)
            ttft.add_metric(name, (tally.shadow_ttft_s - tally.taken_ttft_s) / (tally.num_decisions or 1))
            hits.add_metric(name, (tally.shadow_hit_tokens - tally.taken_hit_tokens) / (tally.prompt_tokens or 1))
        yield from (decisions, agreed, ttft, hits)
