"""Requests as Prometheus metrics. The fleet's own are in `router.router_metrics`."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import code_of
from protos.release import VERSION
from router.jobs import Job
from router.streaming.itl_histogram import ChoiceTimes, ItlHistogram
from router.text.text_stream import TextDelta, Usage

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
GAP_SECONDS = (*TOKEN_SECONDS, 2.5, 5.0, 10.0)
_LONG_SECONDS = (*SECONDS, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_LABELS = ("endpoint", "model")


class Arrival(NamedTuple):
    at_s: float  # by the event loop's clock
    traceparent: str  # the client's header, "" without one


arrival: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
"""When the head of the request arrived that this task answers. HTTP and gRPC set it."""


class RequestMetrics:
    """One registry an application, never the global one. Labels: the endpoint, the outcome and the model, all closed
    sets."""

    def __init__(self, registry: CollectorRegistry | None = None, *, model: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each of a counter and a histogram, which few can use
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self.model = model
        self.requests = self._counter("requests", "Requests answered; outcome is ok or an error's code", "outcome")
        self.in_flight = Gauge("baton_requests_in_flight", "Requests being answered", _LABELS, registry=self.registry)
        self.ttft = self._histogram("ttft_seconds", "Arrival to first token", SECONDS)
        self.tpot = self._histogram("tpot_seconds", "Mean time between a choice's tokens", TOKEN_SECONDS)
        self.e2e = self._histogram("e2e_seconds", "Arrival to last token", _LONG_SECONDS)
        self.queue = self._histogram("queue_seconds", "Wait for a worker", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.answer_length = self._histogram("request_generated_tokens", "Tokens generated for a request", _TOKENS)
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that a worker had, however they ended"
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in a prefix cache")
        self._endpoints: dict[str, EndpointMetrics] = {}
        self.gaps: Collector = _GapCollector(self._endpoints)
        self.registry.register(self.gaps)
        build = Gauge(
            "baton_build_info", "1, with what runs here", ("version", "python", "model"), registry=self.registry
        )
        build.labels(VERSION, platform.python_version(), model).set(1)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", documentation, (*_LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}", documentation, _LABELS, buckets=buckets, registry=self.registry)

    def track(self, endpoint: str) -> Track:
        """`endpoint` is one of our own names, never the client's text."""
        return Track(self.endpoint(endpoint))

    def endpoint(self, name: str) -> EndpointMetrics:
        if name not in self._endpoints:
            self._endpoints[name] = EndpointMetrics(self, name)
        return self._endpoints[name]


class EndpointMetrics:
    """The metrics of one endpoint: looking a label up costs more than counting."""

    def __init__(self, metrics: RequestMetrics, name: str) -> None:
        self.owner = metrics
        labels = self.labels = (name, metrics.model)
        self._requests = metrics.requests
        self._answered: dict[str, Counter] = {}
        self.itl = ItlHistogram(GAP_SECONDS)
        self.in_flight = metrics.in_flight.labels(*labels)
        self.ttft = metrics.ttft.labels(*labels)
        self.tpot = metrics.tpot.labels(*labels)
        self.e2e = metrics.e2e.labels(*labels)
        self.queue = metrics.queue.labels(*labels)
        self.prompt_length = metrics.prompt_length.labels(*labels)
        self.answer_length = metrics.answer_length.labels(*labels)
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.generated_tokens = metrics.generated_tokens.labels(*labels)
        self.cached_tokens = metrics.cached_tokens.labels(*labels)

    def answered(self, outcome: str) -> Counter:
        if outcome not in self._answered:
            self._answered[outcome] = self._requests.labels(*self.labels, outcome)
        return self._answered[outcome]


class _GapCollector(Collector):
    def __init__(self, endpoints: dict[str, EndpointMetrics]) -> None:
        self._endpoints = endpoints

    def collect(self) -> Iterable[Metric]:
        itl = HistogramMetricFamily("baton_itl_seconds", "Time between two tokens of an answer", labels=_LABELS)
        for endpoint in self._endpoints.values():
            itl.add_metric(endpoint.labels, endpoint.itl.buckets(), endpoint.itl.sum_s)
        yield itl


class Track:
    """Measures one request until `finish`: a context manager, unless the response outlives the block. `usage` is None,
    and `outcome` and `tenant` are "", until known."""

    def __init__(self, metrics: EndpointMetrics) -> None:
        self._metrics = metrics
        self.endpoint = metrics.labels[0]
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._choices: dict[int, ChoiceTimes] = {}
        self._has_begun = False
        self._generated = metrics.generated_tokens
        self.usage: Usage | None = None
        self.tenant = ""
        self.outcome = ""
        self.jobs: Sequence[Job] = ()
        metrics.in_flight.inc()

    def belongs_to(self, metrics: RequestMetrics) -> None:
        """Moves the request to another model's metrics, before its first token."""
        if metrics is not self._metrics.owner:
            self._metrics.in_flight.dec()
            self._metrics = metrics.endpoint(self.endpoint)
            self._generated = self._metrics.generated_tokens
            self._metrics.in_flight.inc()

    def times(self, index: int) -> ChoiceTimes:
        if index not in self._choices:
            self._choices[index] = ChoiceTimes(self._metrics.itl)
        return self._choices[index]

    def saw(self, piece: TextDelta) -> None:
        """Called once a piece, in order."""
        if not piece.num_tokens:
            return
        now, times = self._clock(), self.times(piece.index)
        if not self._has_begun:
            self._has_begun = True
            self._metrics.ttft.observe(now - self._start)
        if not times.num_tokens:
            self._metrics.queue.observe(piece.queue_s)
            times.begin(piece.num_tokens, now)
        elif piece.num_tokens > piece.num_taken:
            times.came(piece.num_tokens - piece.num_taken, now)
        self._generated.inc(piece.num_tokens)

    def set_unread(self, is_unread: bool) -> None:
        for job in self.jobs:
            job.client.unread(is_unread)

    def used(self, usage: Usage) -> None:
        """Called once, however the request ended."""
        self.usage = usage
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)

    def finish(self, error: BaseException | None = None) -> None:
        """Later calls change nothing."""
        if self.outcome:
            return
        self.outcome = "ok" if error is None else code_of(error)
        self._metrics.in_flight.dec()
        self._metrics.answered(self.outcome).inc()
        if error is not None:
            return
        self._metrics.e2e.observe(self._clock() - self._start)
        for times in self._choices.values():
            if times.num_tokens > 1:
                self._metrics.tpot.observe((times.last_s - times.first_s) / (times.num_tokens - 1))
        if self.usage is not None:
            self._metrics.prompt_length.observe(self.usage.prompt_tokens)
            self._metrics.answer_length.observe(self.usage.completion_tokens)

    def __enter__(self) -> Track:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(error)
