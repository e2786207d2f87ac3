"""A request's spans, made from its records when it has ended:

    chat demo ─┬─ receive   head of the request to its last validated token
               └─ choice    only of requests with several
                   ├─ queue      until it was its turn
                   ├─ route      until workers were chosen, and blocks reserved
                   ├─ prefill    until the first token
                   ├─ transfer   from the computed prompt to the KV's arrival: what no computation hid
                   └─ decode     to the end; a failure or a move ends it

After a failure the spans from `route` on come again, after a move `decode` does; the first of them links to the span
before it. An answer that continues after a failure has `resume` for `prefill` and `decode`.
Names of attributes are those of OpenTelemetry's semantic conventions for generative AI, else they begin with `baton.`.
No prompt and no answer is in a span.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from opentelemetry.trace import SpanContext, SpanKind

from protos.codec import Value
from protos.values import FinishReason
from router.traces.request_trace import EventKind, Fact, TraceEvent

Attribute = str | int | float | tuple[str, ...]


class TraceSpan(Value, frozen=True, kw_only=True):
    """Times are seconds by the event loop's clock. `parent_id` 0: none. `error`: a code or "". `links`: ids of spans of
    the same trace."""

    span_id: int
    parent_id: int
    name: str
    start_s: float
    end_s: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, Attribute] = {}
    error: str = ""
    links: tuple[int, ...] = ()


class EndedChoice(Value, frozen=True, kw_only=True):
    """One job, as it ended. `finish`: a finish reason or an error's code."""

    events: tuple[TraceEvent, ...]
    finish: str


class TracedRequest(Value, frozen=True, kw_only=True):
    """An ended request. Times are by the event loop's clock. `attributes` are its own span's. `code` is an error's, ""
    without one."""

    name: str
    trace_id: int
    wall_offset_s: float  # the wall clock's time less the event loop's
    parent: SpanContext | None  # the client's span
    arrived_s: float
    received_s: float
    ended_s: float
    attributes: Mapping[str, Attribute]
    choices: tuple[EndedChoice, ...]
    code: str = ""


FINISHED = frozenset((FinishReason.STOP, FinishReason.LENGTH))


def new_span_id() -> int:
    return random.getrandbits(64) or 1


def spans_of(record: TracedRequest) -> list[TraceSpan]:
    root, begun_s = new_span_id(), record.arrived_s
    spans = [
        TraceSpan(
            span_id=root,
            parent_id=record.parent.span_id if record.parent is not None else 0,
            name=record.name,
            start_s=begun_s,
            end_s=record.ended_s,
            kind=SpanKind.SERVER,
            attributes=record.attributes,
            error=record.code,
        ),
        TraceSpan(span_id=new_span_id(), parent_id=root, name="receive", start_s=begun_s, end_s=record.received_s),
    ]
    for number, choice in enumerate(record.choices):
        parent = root
        if len(record.choices) > 1 and choice.events:
            parent = new_span_id()
            begin_s, end_s = choice.events[0].at_s, choice.events[-1].at_s
            facts: dict[str, Attribute] = {"baton.choice": number, "baton.finish_reason": choice.finish}
            spans.append(
                TraceSpan(span_id=parent, parent_id=root, name="choice", start_s=begin_s, end_s=end_s, attributes=facts)
            )
        spans += _Stages(parent).of(choice)
    return spans


class _Stages:
    """Walks one job's events; each ends a stage and begins the next."""

    _NEXT: Mapping[EventKind, tuple[str, str]] = {
        EventKind.RECEIVED: ("", "queue"),
        EventKind.ADMITTED: ("queue", "route"),
        EventKind.SUBMITTED: ("route", "prefill"),
        EventKind.FIRST_TOKEN: ("prefill", "decode"),
        EventKind.PREFILLED: ("prefill", "transfer"),
        EventKind.KV_ARRIVED: ("transfer", "decode"),
        EventKind.MOVED: ("decode", "decode"),
    }

    def __init__(self, parent_id: int) -> None:
        self._parent_id = parent_id
        self._open: dict[str, tuple[float, dict[str, Attribute], tuple[int, ...]]] = {}
        self._last = 0
        self._links: tuple[int, ...] = ()
        self._resumes = False
        self._chunks = 0

    def of(self, choice: EndedChoice) -> Iterator[TraceSpan]:
        failed, ended = EventKind.FAILED, EventKind.ENDED  # an enum's attributes are slow to read
        for event in choice.events:
            if event.what is failed:
                yield from self._end_all(event.at_s, error=str(event.facts["code"]))
                self._links, self._resumes = (self._last,), bool(event.facts["tokens"])
                self._begin("route", event.at_s)
            elif event.what is ended:
                yield from self._end_all(event.at_s, error="" if choice.finish in FINISHED else choice.finish)
            elif event.what in self._NEXT:
                yield from self._advance(event)
            elif event.what is EventKind.CHUNK:
                self._chunks += 1
                self._note({"chunks": self._chunks, "computed_tokens": event.facts["tokens"]})
            else:
                self._note(event.facts)

    def _advance(self, event: TraceEvent) -> Iterator[TraceSpan]:
        ends, begins = self._NEXT[event.what]
        if self._resumes and event.what is EventKind.SUBMITTED:
            begins = "resume"
        if ends in self._open:
            if event.what is EventKind.KV_ARRIVED:
                self._note(event.facts, ends)
            yield self._end(ends, event.at_s)
        if event.what is EventKind.MOVED:
            self._links = (self._last,)
        if not self._open:
            self._begin(begins, event.at_s)
        if event.what is not EventKind.KV_ARRIVED:
            self._note(event.facts)

    def _begin(self, name: str, at_s: float) -> None:
        self._open[name] = (at_s, {}, self._links)
        self._links = ()

    def _note(self, facts: Mapping[str, Fact], stage: str = "") -> None:
        if self._open:
            _, attributes, _ = self._open[stage or next(reversed(self._open))]
            attributes.update({f"baton.{name}": fact for name, fact in facts.items()})

    def _end(self, name: str, at_s: float, error: str = "") -> TraceSpan:
        start_s, attributes, links = self._open.pop(name)
        self._last = new_span_id()
        return TraceSpan(
            span_id=self._last,
            parent_id=self._parent_id,
            name=name,
            start_s=start_s,
            end_s=at_s,
            attributes=attributes,
            error=error,
            links=links,
        )

    def _end_all(self, at_s: float, error: str) -> Iterator[TraceSpan]:
        for name in tuple(self._open):
            yield self._end(name, at_s, error)
