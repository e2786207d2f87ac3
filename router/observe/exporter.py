"""Sends the traces of ended requests to a collector with OpenTelemetry's SDK, from its thread.

request ends ─▶ SDK's queue, bounded ─▶ SDK's thread: spans of 5 s, or of 512 requests, in one POST ─▶ collector"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.event_loop import loop_time
from protos.release import VERSION
from router.observe.request_observer import EndedRequest, ObservedRequest
from router.observe.spans import Attribute, EndedChoice, TracedRequest, spans_of
from router.request_metrics import arrival
from router.router_config import TelemetryConfig

MAX_QUEUED = 2048
MAX_BATCH = 512
FLUSH_S = 5.0
TIMEOUT_S = 10.0  # of a batch, with all its retries
CLOSE_S = 5.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status()
_NO_RESOURCE = Resource.get_empty()
_SCOPE = InstrumentationScope("baton", VERSION)
_PROPAGATOR = TraceContextTextMapPropagator()


OPERATIONS = {
    "completions": "text_completion",
    "ollama.generate": "text_completion",
    "grpc.complete": "text_completion",
    "embeddings": "embeddings",
    "ollama.embed": "embeddings",
    "rerank": "rerank",
    "score": "rerank",
}
"""`gen_ai.operation.name` by endpoint; all others are `chat`."""


class TraceExporter(Collector):
    """`close` it at the end. Series: `baton_traces_total{outcome}`: `sent`, `dropped` for want of room, `failed`:
    refused by the collector, or not taken in time."""

    def __init__(self, config: TelemetryConfig, *, model: str, gateway_id: str) -> None:
        self._sample = config.sample
        self._model = model
        resource = Resource({"service.name": config.service_name, "service.instance.id": gateway_id})
        self._exporter = RequestExporter(config, resource)
        self._processor = BatchSpanProcessor(
            self._exporter, MAX_QUEUED, FLUSH_S * 1e3, MAX_BATCH, meter_provider=NoOpMeterProvider()
        )
        self._num_queued = 0
        self._num_dropped = 0

    @property
    def outcomes(self) -> Mapping[str, int]:
        return {**self._exporter.outcomes, "dropped": self._num_dropped}

    def began(self, request: ObservedRequest) -> None: ...

    def ended(self, ended: EndedRequest) -> None:
        """The caller decides whether its request is sampled, else `sample` does."""
        came, records, endpoint = arrival.get(), ended.request.records, ended.request.endpoint
        parent = parse_traceparent(came.traceparent) if came is not None and came.traceparent else None
        if not records or not self._is_sampled(parent):
            return
        if self._num_queued - self._exporter.num_taken >= MAX_QUEUED:
            self._num_dropped += 1
            return
        now, received_s = loop_time(), records[0].received_s
        arrived_s = came.at_s if came is not None else received_s
        record = TracedRequest(
            name=f"{OPERATIONS.get(endpoint, 'chat')} {self._model}",
            trace_id=parent.trace_id if parent is not None else random.getrandbits(128) or 1,
            wall_offset_s=time.time() - now,
            parent=parent,
            arrived_s=arrived_s,
            received_s=received_s,
            ended_s=now,
            attributes=attributes_of(ended, self._model, arrived_s),
            choices=tuple(EndedChoice(events=tuple(trace.events), finish=trace.outcome) for trace in records),
            code="" if ended.error is None else ended.outcome,
        )
        self._num_queued += 1
        self._processor.on_end(QueuedRequest(record))

    def close(self) -> None:
        """Sends the queue for `CLOSE_S` at most."""
        limit = threading.Timer(CLOSE_S, self._exporter.shutdown)
        limit.start()
        self._processor.shutdown()
        limit.cancel()
        limit.join()

    def collect(self) -> Iterable[Metric]:
        traces = CounterMetricFamily("baton_traces", "Traces of requests for the collector", labels=("outcome",))
        for outcome, count in self.outcomes.items():
            traces.add_metric((outcome,), count)
        yield traces

    def _is_sampled(self, parent: SpanContext | None) -> bool:
        return parent.trace_flags.sampled if parent is not None else random.random() < self._sample


class QueuedRequest(ReadableSpan):
    """A request in the SDK's queue. Its spans are made when they are sent."""

    def __init__(self, record: TracedRequest) -> None:
        super().__init__("", context=_context(record.trace_id, 1), resource=_NO_RESOURCE)
        self.record = record


class RequestExporter(SpanExporter):
    """Sends the spans of queued requests."""

    def __init__(self, config: TelemetryConfig, resource: Resource) -> None:
        self._otlp = OTLPSpanExporter(
            config.traces_url, headers=config.header_values, timeout=TIMEOUT_S, meter_provider=NoOpMeterProvider()
        )
        self._resource = resource
        self._is_shut = False
        self.outcomes: Counter[str] = Counter(sent=0, failed=0)
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        requests = [span.record for span in spans if isinstance(span, QueuedRequest)]
        self.num_taken += len(requests)
        result = SpanExportResult.FAILURE
        try:
            result = self._otlp.export([span for record in requests for span in readable_spans(record, self._resource)])
        finally:
            self.outcomes["sent" if result is SpanExportResult.SUCCESS else "failed"] += len(requests)
        return result

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._otlp.shutdown()


def parse_traceparent(header: str) -> SpanContext | None:
    """None for a header that the standard says to ignore (https://www.w3.org/TR/trace-context/)."""
    span = get_current_span(_PROPAGATOR.extract({"traceparent": header}, Context()))
    context = span.get_span_context()
    return context if context.is_valid else None


def readable_spans(record: TracedRequest, resource: Resource) -> Iterator[ReadableSpan]:
    for span in spans_of(record):
        yield ReadableSpan(
            span.name,
            context=_context(record.trace_id, span.span_id),
            parent=_context(record.trace_id, span.parent_id) if span.parent_id else None,
            resource=resource,
            attributes={**span.attributes, "error.type": span.error} if span.error else span.attributes,
            links=tuple(Link(_context(record.trace_id, other)) for other in span.links),
            kind=span.kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else _OK,
            start_time=int((span.start_s + record.wall_offset_s) * 1e9),
            end_time=int((span.end_s + record.wall_offset_s) * 1e9),
            instrumentation_scope=_SCOPE,
        )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


def attributes_of(ended: EndedRequest, model: str, arrived_s: float) -> Mapping[str, Attribute]:
    ask, records, _, endpoint, _, _ = ended.request
    sampling, firsts = ask.jobs[0].sampling, [trace.timestamps.first_s for trace in records]
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": OPERATIONS.get(endpoint, "chat"),
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": ask.request_id,
        "gen_ai.response.finish_reasons": tuple(trace.outcome for trace in records),
        "gen_ai.usage.input_tokens": ended.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.usage.cached_tokens,
        "gen_ai.usage.output_tokens": ended.usage.completion_tokens,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.choice.count": ask.n,
        "baton.request_id": ask.jobs[0].group_id,
        "baton.endpoint": endpoint,
    }
    if (first_s := min((at_s for at_s in firsts if at_s is not None), default=None)) is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_s - arrived_s
    if session := ask.jobs[0].session:
        attributes["gen_ai.conversation.id"] = session
    if ask.tenant.name:
        attributes["baton.tenant"] = ask.tenant.name
    return attributes
