"""Prometheus metrics of the fleet, admission, dispatch and prediction, read at every scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.values import WorkerRole
from router.admission.admission import Admission
from router.dispatch.canary import Canary
from router.dispatch.migration import Migrations
from router.dispatch.prefix_pull import PrefixPulls
from router.fleet.fleet import Fleet
from router.fleet.member import WorkerState, WorkerStatus
from router.fleet.pool_totals import COUNTERS, LANE_LABELS, LoadNumbers, lane_number, number
from router.routing.predictor import Predictor
from router.traces.shadow import ShadowPolicy

POOL_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of jobs that this pool computed", "num_prompt_tokens"),
    ("prefix_hit_tokens", "Of those, found in its prefix cache", "num_cached_tokens"),
    ("losses", "Times a worker that was ready was lost", "num_losses"),
    ("pauses", "Times a worker that kept failing was kept away from", "num_pauses"),
)
POOL_GAUGES: Sequence[tuple[str, str, LoadNumbers, Sequence[str]]] = (
    ("running", "Requests in the workers' batches", number("num_running"), ()),
    ("waiting", "Requests waiting for a place in a batch", number("num_waiting"), ()),
    ("queued_prefill_tokens", "Prompt tokens waiting to be read", number("queued_prefill_tokens"), ()),
    ("kv_blocks", "KV blocks there are", number("num_blocks"), ()),
    ("kv_blocks_used", "KV blocks in use, without cached ones that may be evicted",
     lambda load: {(): load.num_blocks - load.num_free_blocks}, ()),
    ("tickets", "Reservations that wait for KV", number("num_tickets"), ()),
    ("host_kv_blocks", "KV blocks host memory has room for",
     lambda load: {(): load.host.num_blocks if load.host is not None else 0}, ()),
    ("host_kv_blocks_used", "KV blocks in host memory",
     lambda load: {(): load.host.num_used if load.host is not None else 0}, ()),
    ("lanes", "Lanes that are open", lane_number("num_open"), LANE_LABELS),
    ("speculation_paused", "Workers on which drafts did not pay and are paused",
     lambda load: {(p.source,): 1 for p in (load.speculation.paused if load.speculation else ())}, ("source",)),
)  # fmt: skip
HERE = (WorkerState.READY, WorkerState.DRAINING)
MAX_WORKERS = 64
WORKER_GAUGES: Sequence[tuple[str, str, Callable[[WorkerStatus], float]]] = (
    ("running", "Requests in the worker's batch", lambda worker: worker.load.num_running),
    ("waiting", "Requests waiting for a place in its batch", lambda worker: worker.load.num_waiting),
    ("queued_prefill_tokens", "Prompt tokens waiting to be read by it",
     lambda worker: worker.load.queued_prefill_tokens),
    ("kv_blocks", "KV blocks it has", lambda worker: worker.load.num_blocks),
    ("kv_blocks_used", "KV blocks in use, without cached ones that may be evicted",
     lambda worker: worker.load.num_blocks - worker.load.num_free_blocks),
    ("expert_imbalance", "Tokens of its most popular expert over the mean of the layer, in the worst layer; "
     "0 without experts", lambda worker: worker.load.expert_imbalance),
    ("expert_rank_imbalance", "The same of ranks that have whole experts; 0 where they share every expert",
     lambda worker: worker.load.expert_rank_imbalance),
    ("expert_placed_imbalance", "That of ranks if each had room for one more expert, and experts were placed by their "
     "loads", lambda worker: worker.load.expert_placed_imbalance),
    ("kv_blocks_cached", "KV blocks in its prefix cache", lambda worker: worker.num_cached_blocks),
)  # fmt: skip
PREDICTED = ("ttft", "tpot")
Labels = TypeVar("Labels", bound=tuple[str, ...])


class Scraped(Collector):
    """Calls `read` at every scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class ModelsCollector(Collector):
    """/metrics of several models as one page. Series without a label `model` get one. `registries`: by the model's
    name, without shared metrics."""

    def __init__(self, registries: Mapping[str, CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for model, registry in self._registries.items():
            for metric in registry.collect():
                whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    whole.samples.append(sample._replace(labels={"model": model} | sample.labels))
        return merged.values()

    def describe(self) -> Iterable[Metric]:
        """Describes no series before they are read, so that other collectors may define these names."""
        return ()


def counter(name: str, text: str, values: Mapping[Labels, float], labels: Sequence[str] = ()) -> Metric:
    family = CounterMetricFamily(f"baton_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, values: Mapping[Labels, float], labels: Sequence[str] = ()) -> Metric:
    family = GaugeMetricFamily(f"baton_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def fleet_metrics(fleet: Fleet) -> Iterable[Metric]:
    """Numbers by pool, of single workers, and of adapters."""
    status = fleet.status()
    loads = [(w.info.role, w.load) for w in status if w.info is not None and w.state in HERE]
    for name, text, numbers, labels in POOL_GAUGES:
        sums = _by_role(labels)
        for role, load in loads:
            for key, value in numbers(load).items():
                sums[role, *key] = sums.get((role, *key), 0.0) + value
        yield gauge(f"pool_{name}", text, sums, ("pool", *labels))
    for name, text, attribute in POOL_COUNTERS:
        values = {(role,): getattr(totals, attribute) for role, totals in fleet.offers.totals.items()}
        yield counter(f"pool_{name}", text, values, ("pool",))
    counts = fleet.load_totals()
    for name, text, _, labels in COUNTERS:
        yield counter(f"pool_{name}", text, {**_by_role(labels), **counts[name]}, ("pool", *labels))
    states = Counter[tuple[str, ...]](dict.fromkeys([(role, state) for role in WorkerRole for state in WorkerState], 0))
    states.update((w.info.role if w.info else "unknown", w.state) for w in status)
    yield gauge("pool_workers", "Workers by state", states, ("pool", "state"))
    shared = {(): float(not fleet.feed.trouble)}
    yield gauge("index_shared", "0 while a prefix index in Redis is not reached", shared)
    yield from _by_worker(status)
    adapters, labels = fleet.adapters().values(), ("adapter",)
    having = {(adapter.name,): fleet.lora.num_workers(adapter) for adapter in adapters}
    yield gauge("adapter_workers", "Workers that have the adapter", having, labels)
    asked = {(adapter.name,): fleet.lora.num_jobs[adapter.name] for adapter in adapters}
    yield counter("adapter_jobs", "Answers requested of the adapter", asked, labels)


def _by_role(labels: Sequence[str]) -> dict[tuple[str, ...], float]:
    """The initial values: 0 for each pool, none with further labels."""
    return {} if labels else dict.fromkeys([(role,) for role in WorkerRole], 0.0)


def _by_worker(status: Sequence[WorkerStatus]) -> Iterable[Metric]:
    """Metrics of at most `MAX_WORKERS` workers: the number of series must stay bounded in a large cluster."""
    listed = {
        (worker.worker_id, worker.info.role): worker
        for worker in sorted(status, key=lambda worker: worker.worker_id)
        if worker.info is not None
    }
    listed = dict(islice(listed.items(), MAX_WORKERS))
    unlisted = {(): len(status) - len(listed)}
    yield gauge("worker_unlisted", "Workers beyond those that have series of their own", unlisted)
    ready = {key: float(worker.state == WorkerState.READY) for key, worker in listed.items()}
    yield gauge("worker_ready", "1 while the worker takes work", ready, ("worker", "pool"))
    for name, text, value_of in WORKER_GAUGES:
        values = {key: value_of(worker) if worker.state in HERE else 0.0 for key, worker in listed.items()}
        yield gauge(f"worker_{name}", text, values, ("worker", "pool"))


def admission_metrics(admission: Admission) -> Iterable[Metric]:
    yield gauge("admission_waiting", "Requests in line at the gateway", {(): admission.num_waiting})
    refused = {(reason,): count for reason, count in asdict(admission.refused).items()}
    yield counter("admission_refused", "Requests refused, by reason", refused, ("reason",))


def dispatch_metrics(moves: Migrations, pulls: PrefixPulls, canary: Canary) -> Iterable[Metric]:
    outcomes = {("moved",): moves.num_moved, ("stayed",): moves.num_stayed}
    yield counter("moves", "Running sequences that were to go on elsewhere with their KV", outcomes, ("outcome",))
    yield counter("pulled_blocks", "Cached KV blocks fetched from another worker", {(): pulls.num_blocks})
    failures = {(reason,): count for reason, count in pulls.failures.items()}
    yield counter("pull_failures", "Pulls that came to nothing", failures, ("reason",))
    compared = {(outcome,): count for outcome, count in canary.outcomes.items()}
    yield counter("canary", "Greedy requests run a second time, on one worker alone", compared, ("outcome",))


def prediction_metrics(predictor: Predictor, shadows: Sequence[ShadowPolicy] = ()) -> Iterable[Metric]:
    """Prediction errors by worker, and shadow policies if there are any."""
    errors = {
        (worker_id, predicted): error
        for worker_id, both in predictor.errors().items()
        for predicted, error in zip(PREDICTED, both, strict=True)
    }
    labels = ("worker", "what")
    sizes, biases = ({key: getattr(e, part) for key, e in errors.items()} for part in ("mean_s", "bias_s"))
    counts = {key: error.num_observed for key, error in errors.items()}
    yield gauge("prediction_error_seconds", "Absolute difference of measured and predicted, lately", sizes, labels)
    yield gauge("prediction_bias_seconds", "Measured less predicted, lately", biases, labels)
    yield counter("predictions", "Predictions that were measured", counts, labels)
    if not shadows:
        return
    tallies, policy = {(shadow.name,): shadow.tally for shadow in shadows}, ("policy",)
    decisions = {name: tally.num_decisions for name, tally in tallies.items()}
    agreed = {name: tally.num_agreed for name, tally in tallies.items()}
    ttft = {name: (t.shadow_ttft_s - t.taken_ttft_s) / (t.num_decisions or 1) for name, t in tallies.items()}
    hits = {name: (t.shadow_hit_tokens - t.taken_hit_tokens) / (t.prompt_tokens or 1) for name, t in tallies.items()}
    yield counter("shadow_decisions", "Requests a shadow policy scored", decisions, policy)
    yield counter("shadow_agreements", "Of those, with the same choice", agreed, policy)
    yield gauge("shadow_ttft_difference_seconds", "Its predicted less the taken choice's, mean", ttft, policy)
    yield gauge("shadow_hit_difference_ratio", "Its hit rate less the taken choices'", hits, policy)
