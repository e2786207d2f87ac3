"""What the faces measure of requests, as Prometheus metrics. The fleet's own are in `router.fleet_metrics`."""

from __future__ import annotations

import asyncio
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protos.errors import BatonError, Cancelled, Internal
from router.text.answer import Piece, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LONG_SECONDS = (*_SECONDS, 120.0, 300.0, 600.0)


class RequestMetrics:
    """One registry an application, never the global one. Labels: the endpoint and the outcome, both closed sets."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered; outcome is ok or an error's code", "outcome")
        self.in_flight = Gauge(
            "baton_requests_in_flight", "Requests being answered", ("endpoint",), registry=self.registry
        )
        self.ttft = self._histogram("ttft", "Arrival to first token", _SECONDS)
        self.tpot = self._histogram("tpot", "Mean time between a choice's tokens", _TOKEN_SECONDS)
        self.e2e = self._histogram("e2e", "Arrival to last token", _LONG_SECONDS)
        self.queue = self._histogram("queue", "Wait for a worker", _SECONDS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of completed requests")
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in a prefix cache")
        self._endpoints: dict[str, Endpoint] = {}

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", told, ("endpoint", *labels), registry=self.registry)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}_seconds", told, ("endpoint",), buckets=buckets, registry=self.registry)

    def track(self, endpoint: str) -> Track:
        """Starts a request's clock; `endpoint` is one of our own names, never the client's text."""
        if endpoint not in self._endpoints:
            self._endpoints[endpoint] = Endpoint(self, endpoint)
        return Track(self._endpoints[endpoint])


class Endpoint:
    """The metrics of one endpoint: looking a label up costs more than counting."""

    def __init__(self, metrics: RequestMetrics, name: str) -> None:
        self._name = name
        self._requests = metrics.requests
        self._answered: dict[str, Counter] = {}
        self.in_flight = metrics.in_flight.labels(name)
        self.ttft = metrics.ttft.labels(name)
        self.tpot = metrics.tpot.labels(name)
        self.e2e = metrics.e2e.labels(name)
        self.queue = metrics.queue.labels(name)
        self.prompt_tokens = metrics.prompt_tokens.labels(name)
        self.generated_tokens = metrics.generated_tokens.labels(name)
        self.cached_tokens = metrics.cached_tokens.labels(name)

    def answered(self, outcome: str) -> Counter:
        if outcome not in self._answered:
            self._answered[outcome] = self._requests.labels(self._name, outcome)
        return self._answered[outcome]


class Track:
    """One request, measured from here to `finish`: a context manager, unless its response outlives the block."""

    def __init__(self, metrics: Endpoint) -> None:
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._spans: dict[int, tuple[float, float, int]] = {}
        self._finished = False
        self._generated = metrics.generated_tokens
        metrics.in_flight.inc()

    def saw(self, piece: Piece) -> None:
        """Notes a piece's tokens. Called once a piece, in order."""
        if not piece.num_tokens:
            return
        now = self._clock()
        if not self._spans:
            self._metrics.ttft.observe(now - self._start)
        if (span := self._spans.get(piece.index)) is None:
            self._metrics.queue.observe(piece.queue_s)
            self._spans[piece.index] = (now, now, piece.num_tokens)
        else:
            self._spans[piece.index] = (span[0], now, span[2] + piece.num_tokens)
        self._generated.inc(piece.num_tokens)

    def wrote(self, index: int, num_tokens: int, now: float) -> None:
        """Notes more tokens of a choice that `saw` has noted before."""
        first, _, count = self._spans[index]
        self._spans[index] = (first, now, count + num_tokens)
        self._generated.inc(num_tokens)

    def count(self, usage: Usage) -> None:
        """Notes the prompt's tokens, once the whole answer is there."""
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the measurement; later calls change nothing."""
        if self._finished:
            return
        self._finished = True
        self._metrics.in_flight.dec()
        self._metrics.answered(_outcome(error)).inc()
        if error is not None:
            return
        self._metrics.e2e.observe(self._clock() - self._start)
        for first, last, count in self._spans.values():
            if count > 1:
                self._metrics.tpot.observe((last - first) / (count - 1))

    def __enter__(self) -> Track:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(error)


def _outcome(error: BaseException | None) -> str:
    match error:
        case None:
            return "ok"
        case BatonError():
            return error.code
        case asyncio.CancelledError() | GeneratorExit():
            return Cancelled.code
        case _:
            return Internal.code
