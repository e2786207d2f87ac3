"""Spans in OTLP's JSON (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): ids in hexadecimal, 64-bit
numbers as texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from typing import Any

import orjson

from router.telemetry.spans import Attribute, EndedRequest, TraceSpan, spans_of

_FAILED = 2  # STATUS_CODE_ERROR


def export_request(
    records: Sequence[EndedRequest], *, resource: Mapping[str, Attribute], wall_offset_s: float
) -> bytes:
    """The body of a POST to /v1/traces. `wall_offset_s`: the wall clock's time less the event loop's."""
    spans = [_encoded(span, record, wall_offset_s) for record in records for span in spans_of(record)]
    scope = {"name": "baton", "version": _version()}
    return orjson.dumps(
        {
            "resourceSpans": [
                {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
            ]
        }
    )


@cache
def _version() -> str:
    return version("baton")


def _encoded(span: TraceSpan, record: EndedRequest, wall_offset_s: float) -> dict[str, Any]:
    attributes = _attributes(span.attributes)
    encoded: dict[str, Any] = {
        "traceId": record.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(int((span.start_s + wall_offset_s) * 1e9)),
        "endTimeUnixNano": str(int((span.end_s + wall_offset_s) * 1e9)),
        "attributes": attributes,
    }
    if span.links:
        encoded["links"] = [{"traceId": record.trace_id, "spanId": other} for other in span.links]
    if span.error:
        encoded["status"] = {"code": _FAILED, "message": span.error}
        attributes.append({"key": "error.type", "value": {"stringValue": span.error}})
    return encoded


def _attributes(given: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    return [_attribute(key, value) for key, value in given.items()]


@lru_cache(4096, typed=True)
def _attribute(key: str, value: Attribute) -> dict[str, Any]:
    """Most attributes are those of the request before."""
    return {"key": key, "value": _VALUE[type(value)](value)}


_VALUE: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    str: lambda value: {"stringValue": value},
    float: lambda value: {"doubleValue": value},
    int: lambda value: {"intValue": str(value)},
    tuple: lambda value: {"arrayValue": {"values": [{"stringValue": one} for one in value]}},
}
