"""/metrics of several models as one page: series of a model that have no label `model` get one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

LABEL = "model"


class ModelsCollector(Collector):
    """`registries`: of each model, by its name, without what the models share."""

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for model, registry in self._registries.items():
            for metric in registry.collect():
                whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    whole.samples.append(sample._replace(labels={LABEL: model} | sample.labels))
        return merged.values()

    def describe(self) -> Iterable[Metric]:
        """Describes no series before they are read: other collectors may not have these names."""
        return ()
