"""A request's records become spans: stages in order, each within its parent, links after failures and moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, TraceFlags

from router.observe.exporter import QueuedRequest, RequestExporter, attributes_of, parse_traceparent, readable_spans
from router.observe.request_observer import EndedRequest, ObservedRequest
from router.observe.spans import EndedChoice, TracedRequest, TraceSpan, spans_of
from router.router_config import TelemetryConfig
from router.text.text_stream import Usage, UsageCounter
from router.traces.request_trace import EventKind, RequestTrace, TraceEvent
from tests.unit.router.text.test_text_stream import asking

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PARENT = SpanContext(int(TRACE, 16), int(CALLER, 16), is_remote=True, trace_flags=TraceFlags(1))


def record(*choices: list[TraceEvent], finish: str = "stop", code: str = "") -> TracedRequest:
    return TracedRequest(
        name="chat demo", trace_id=PARENT.trace_id, wall_offset_s=1e9, parent=PARENT, arrived_s=0.0, received_s=1.0,
        ended_s=20.0, attributes={"gen_ai.request.max_tokens": 16},
        choices=tuple(EndedChoice(events=tuple(events), finish=finish) for events in choices), code=code,
    )  # fmt: skip


def at(at_s: float, what: EventKind, **facts: str | int) -> TraceEvent:
    return TraceEvent(what=what, at_s=at_s, facts=facts)


BEGIN = [at(1, EventKind.RECEIVED), at(2, EventKind.ADMITTED), at(2.5, EventKind.DECIDED, decode="d0")]
ALONE = [*BEGIN, at(3, EventKind.SUBMITTED, worker="d0"), at(4, EventKind.FIRST_TOKEN), at(9, EventKind.ENDED)]
PAIR = [
    *BEGIN, at(2.7, EventKind.RESERVED, worker="d0", blocks=4), at(3, EventKind.SUBMITTED, worker="p0"),
    at(4, EventKind.PREFILLED), at(4.1, EventKind.FIRST_TOKEN), at(5, EventKind.KV_ARRIVED), at(9, EventKind.ENDED),
]  # fmt: skip
FAILED = [
    *ALONE[:-1], at(6, EventKind.FAILED, code="worker_lost", tokens=2), at(6.5, EventKind.DECIDED, decode="d1"),
    at(7, EventKind.SUBMITTED, worker="d1"), at(9, EventKind.ENDED),
]  # fmt: skip
MOVED = [*PAIR[:-1], at(7, EventKind.MOVED, source="d0", worker="d1"), at(9, EventKind.ENDED)]


def stages(spans: list[TraceSpan]) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_s, span.end_s) for span in spans[2:]]


def test_a_stage_has_its_events_attributes() -> None:
    events = [
        *PAIR[:5], at(3.2, EventKind.CHUNK, tokens=2048), at(3.8, EventKind.CHUNK, tokens=4103), *PAIR[5:7],
        at(5, EventKind.KV_ARRIVED, kv_bytes=1 << 20, transport="shm", hidden_s=2), at(9, EventKind.ENDED),
    ]  # fmt: skip
    attributes = {span.name: span.attributes for span in spans_of(record(events))[2:]}
    assert attributes["prefill"] == {"baton.worker": "p0", "baton.chunks": 2, "baton.computed_tokens": 4103}
    assert attributes["transfer"] == {"baton.kv_bytes": 1 << 20, "baton.transport": "shm", "baton.hidden_s": 2}
    assert attributes["decode"] == {}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (ALONE, [("queue", 1, 2), ("route", 2, 3), ("prefill", 3, 4), ("decode", 4, 9)]),
        (PAIR, [("queue", 1, 2), ("route", 2, 3), ("prefill", 3, 4), ("transfer", 4, 5), ("decode", 5, 9)]),
        (
            FAILED,
            [
                ("queue", 1, 2), ("route", 2, 3), ("prefill", 3, 4), ("decode", 4, 6), ("route", 6, 7),
                ("resume", 7, 9),
            ],
        ),
        (
            MOVED,
            [
                ("queue", 1, 2), ("route", 2, 3), ("prefill", 3, 4), ("transfer", 4, 5), ("decode", 5, 7),
                ("decode", 7, 9),
            ],
        ),
    ],
)  # fmt: skip
def test_stages_follow_one_another(events: list[TraceEvent], expected: list[tuple[str, float, float]]) -> None:
    spans = spans_of(record(events))
    root, receive = spans[:2]
    assert (root.name, root.parent_id, root.start_s, root.end_s) == ("chat demo", PARENT.span_id, 0.0, 20.0)
    assert (receive.name, receive.start_s, receive.end_s) == ("receive", 0.0, 1.0)
    assert stages(spans) == expected
    assert {span.parent_id for span in spans[1:]} == {root.span_id}
    assert len({span.span_id for span in spans}) == len(spans)


def test_a_continued_span_links_to_the_ended_one() -> None:
    failed, moved = spans_of(record(FAILED)), spans_of(record(MOVED))
    assert [finding.error for finding in failed[2:]] == ["", "", "", "worker_lost", "", ""]
    for spans, place in ((failed, 6), (moved, 7)):
        assert spans[place].links == (spans[place - 1].span_id,)
        assert not any(span.links for span in spans[:place])
    assert moved[7].attributes["baton.worker"] == "d1"


def test_choices_are_apart_and_an_error_is_on_the_root() -> None:
    spans = spans_of(record(ALONE, ALONE, finish="worker_lost", code="worker_lost"))
    root = spans[0]
    choices = [span for span in spans if span.name == "choice"]
    assert [choice.attributes["baton.choice"] for choice in choices] == [0, 1]
    assert {span.parent_id for span in spans if span.name == "decode"} == {choice.span_id for choice in choices}
    assert root.error == "worker_lost"


def test_a_request_that_never_began_has_its_queue() -> None:
    events = [at(1, EventKind.RECEIVED), at(5, EventKind.ENDED)]
    assert stages(spans_of(record(events, finish="overloaded", code="overloaded"))) == [("queue", 1, 5)]
    assert [entry.name for entry in spans_of(record([]))] == ["chat demo", "receive"]


def test_the_sdk_gets_ids_times_links_and_errors() -> None:
    resource = Resource({"service.name": "baton"})
    spans = list(readable_spans(record(FAILED, code="worker_lost"), resource))
    contexts = [span.get_span_context() for span in spans]
    assert {context.trace_id for context in contexts if context is not None} == {PARENT.trace_id}
    root, decode, route = spans[0], spans[5], spans[6]
    assert (root.start_time, root.end_time, root.resource) == (10**18, 10**18 + 20 * 10**9, resource)
    assert root.parent is not None
    assert root.parent.span_id == PARENT.span_id
    assert [link.context for link in route.links] == [contexts[5]]
    for span in (root, decode):
        assert (span.status.is_ok, dict(span.attributes or {})["error.type"]) == (False, "worker_lost")


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{CALLER}-01", True),
        (f"00-{TRACE}-{CALLER}-00", False),
        (f"cc-{TRACE}-{CALLER}-01-of-a-later-version", True),
        (f"00-{TRACE}-{CALLER}-01-more", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        ("", None),
        ("x" * 10_000, None),
    ],
)
def test_a_callers_header_is_read_as_the_standard_says(header: str, sampled: bool | None) -> None:
    parent = parse_traceparent(header)
    assert (None if parent is None else parent.trace_flags.sampled) is sampled
    if parent is not None:
        assert (parent.trace_id, parent.span_id) == (PARENT.trace_id, PARENT.span_id)


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [("chat.completions", "chat"), ("completions", "text_completion"), ("embeddings", "embeddings"),
     ("ollama.embed", "embeddings"), ("score", "rerank")],
)  # fmt: skip
def test_a_request_is_the_operation_of_its_endpoint(endpoint: str, operation: str) -> None:
    asked = replace(asking(n=2), jobs=tuple(replace(job, session="s1") for job in asking(n=2).jobs))
    traces = [RequestTrace(job=job, received_s=1.0, outcome="stop") for job in asked.jobs]
    traces[1].timestamps.first_s = 4.0
    request = ObservedRequest(asked, traces, UsageCounter(asked), endpoint, "", "demo")
    ended = EndedRequest(request, Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=8), None)
    attributes = attributes_of(ended, "demo", 0.5)
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.conversation.id"] == "s1"
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert attributes["gen_ai.response.time_to_first_chunk"] == 3.5
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 8


def test_a_request_whose_spans_fail_is_counted() -> None:
    exporter = RequestExporter(TelemetryConfig(endpoint="http://127.0.0.1:9"), Resource.get_empty())
    bad = record([at(1, EventKind.RECEIVED), at(2, EventKind.FAILED)])
    with pytest.raises(KeyError):
        exporter.export([QueuedRequest(bad)])
    exporter.shutdown()
    assert exporter.outcomes == {"sent": 0, "failed": 1}
