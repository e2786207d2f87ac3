"""GET /admin/requests, /admin/requests/{id} and {id}/cache: how a request was routed, and why; /admin/shadows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, UnknownRequest
from router.admin.door import AdminRoutes
from router.endpoint import query_parameter
from router.gateway import Gateway
from router.http.error_responses import json_response
from router.traces.cache_misses import EvictionLog, explain
from router.traces.json_view import shadow_view, summary, whole
from router.traces.request_trace import RequestTrace, RequestTraces

DEFAULT_COUNT = 50
MAX_COUNT = 1000
_LIMIT = query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_COUNT, "default": DEFAULT_COUNT})


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    records, evictions = gateway.routing.records, gateway.routing.evictions

    def offset_s() -> float:
        return ahead_s(gateway.wall_clock, asyncio.get_running_loop().time)

    def jobs(name: str, view: Callable[[RequestTrace], Mapping[str, Any] | None]) -> Response:
        """Clients may give several requests one id."""
        traces = records.find(name)
        if not traces:
            ports = gateway.replica_ports
            where = f" (its processes answer at the ports {', '.join(map(str, ports))})" if ports else ""
            raise UnknownRequest(
                f"there is no request {name[:128]!r} among the last of this gateway: take the name from the header "
                f"x-baton-request-id of its answer, and ask the gateway that gave it{where}"
            )
        return json_response({"request_id": name, "jobs": [seen for one in traces if (seen := view(one)) is not None]})

    @admin.route("/requests", "The latest requests", query=(_LIMIT,))
    async def recent(request: Request) -> Response:
        count = _count(request.query_params.get("limit", str(DEFAULT_COUNT)))
        offset = offset_s()
        return json_response({"requests": [summary(one, offset) for one in records.recent(count)]})

    @admin.route("/requests/{name:path}/cache", "Why a prompt was not found in a cache")
    async def cache(request: Request) -> Response:
        return jobs(request.path_params["name"], lambda one: _explained(one, records, evictions))

    @admin.route("/requests/{name:path}", "How a request was routed, why, and how it went")
    async def request(request: Request) -> Response:
        return jobs(request.path_params["name"], lambda one: whole(one, offset_s()))

    @admin.route("/shadows", "What other policies would have done")
    async def shadows(request: Request) -> Response:
        return json_response({"shadows": [shadow_view(one) for one in gateway.routing.shadows]})


def ahead_s(clock: Callable[[], float], other: Callable[[], float]) -> float:
    """The clock of another process, by the faster of two readings of both clocks; an interruption between them is an
    error of that size."""
    readings = [(other(), clock(), other()) for _ in range(3)]
    begun, read, over = min(readings, key=lambda one: one[2] - one[0])
    return read - (begun + over) / 2


def _count(limit: str) -> int:
    if limit.isascii() and limit.isdigit() and len(limit) <= 32 and 1 <= int(limit) <= MAX_COUNT:
        return int(limit)
    raise InvalidRequest(f"'limit' is {limit[:32]!r}: it must be a number from 1 to {MAX_COUNT}", param="limit")


def _explained(record: RequestTrace, records: RequestTraces, evictions: EvictionLog) -> dict[str, Any] | None:
    """None until a decision is made."""
    if not record.choices:
        return None
    miss = explain(record, records, evictions)
    return {"job": record.job.request_id, "prompt_tokens": record.num_prompt_tokens, "miss": miss}
