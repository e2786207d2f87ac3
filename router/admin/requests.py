"""GET /admin/requests, /admin/requests/{id} and {id}/cache: how a request was routed, and why; /admin/shadows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import UnknownRequest
from protos.event_loop import loop_time
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Query, second
from router.observe.history import PERIOD_S
from router.traces.cache_misses import EvictionLog, explain
from router.traces.json_view import shadow_view, summary, whole
from router.traces.request_trace import RequestTrace, RequestTraces

DEFAULT_COUNT = 50
MAX_COUNT = 1000


class RecentQuery(Query):
    limit: int = Field(default=DEFAULT_COUNT, ge=1, le=MAX_COUNT, description=f"a number from 1 to {MAX_COUNT}")


class HistoryQuery(Query):
    """Periods that ended at `since` or before are left out."""

    since: int = second(0)


async def recent(gateway: Gateway, _: Request, asked: RecentQuery) -> Response:
    count, offset_s = asked.limit, _offset_s(gateway)
    return json_response({"requests": [summary(trace, offset_s) for trace in gateway.routing.records.recent(count)]})


async def cache(gateway: Gateway, request: Request) -> Response:
    records, evictions = gateway.routing.records, gateway.routing.evictions
    return _jobs(gateway, request, lambda trace: _explained(trace, records, evictions))


async def routed(gateway: Gateway, request: Request) -> Response:
    offset_s = _offset_s(gateway)
    return _jobs(gateway, request, lambda trace: whole(trace, offset_s))


async def shadows(gateway: Gateway, request: Request) -> Response:
    return json_response({"shadows": [shadow_view(shadow) for shadow in gateway.routing.shadows]})


def _jobs(gateway: Gateway, request: Request, view: Callable[[RequestTrace], Mapping[str, Any] | None]) -> Response:
    """Clients may give several requests one name. Raises UnknownRequest."""
    name = request.path_params["name"]
    traces = gateway.routing.records.find(name)
    if not traces:
        ports = gateway.replica_ports
        where = f" (its processes answer at the ports {', '.join(map(str, ports))})" if ports else ""
        raise UnknownRequest(
            f"there is no request {name[:128]!r} among the last of this gateway: take the name from the header "
            f"x-baton-request-id of its answer, and ask the gateway that gave it{where}"
        )
    return json_response({"request_id": name, "jobs": [job for trace in traces if (job := view(trace)) is not None]})


def _offset_s(gateway: Gateway) -> float:
    return ahead_s(gateway.wall_clock, loop_time)


def ahead_s(clock: Callable[[], float], other: Callable[[], float]) -> float:
    """Uses the fastest of three readings of both clocks; its duration bounds the error."""
    readings = [(other(), clock(), other()) for _ in range(3)]
    begun, read, over = min(readings, key=lambda reading: reading[2] - reading[0])
    return read - (begun + over) / 2


def _explained(record: RequestTrace, records: RequestTraces, evictions: EvictionLog) -> dict[str, Any] | None:
    if not record.choices:
        return None
    miss = explain(record, records, evictions)
    return {"job": record.job.request_id, "prompt_tokens": record.num_prompt_tokens, "miss": miss}


async def history(gateway: Gateway, _: Request, asked: HistoryQuery) -> Response:
    points = gateway.history.since(asked.since)
    return json_response({"period_s": PERIOD_S, "points": points})
