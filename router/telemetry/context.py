"""The trace that a request belongs to, as W3C Trace Context has it (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from contextvars import ContextVar

from protos.value import Value

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(Value, frozen=True, kw_only=True):
    """The caller's span. `trace_id` has 32 hexadecimal digits, `span_id` 16."""

    trace_id: str
    span_id: str
    is_sampled: bool


class Arrival(Value, frozen=True, kw_only=True):
    """When a request's head came, by the event loop's clock, and whose part it is."""

    at_s: float
    parent: TraceParent | None


arrival: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
"""Of the request that this task answers. The faces set it where traces are exported."""


def parse_traceparent(header: str) -> TraceParent | None:
    """None for a header that the standard says to ignore."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if not trace_id.strip("0") or not span_id.strip("0") or (version == "00" and more):
        return None
    return TraceParent(trace_id=trace_id, span_id=span_id, is_sampled=bool(int(flags, 16) & _SAMPLED))
