"""GET /admin/requests, /admin/requests/{id} and {id}/cache: how a request was routed, and why; /admin/shadows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from protos.errors import InvalidRequest, UnknownRequest
from router.explain import explain
from router.gateway import Gateway
from router.openai.errors import json_response
from router.record import Record
from router.record_view import shadow_view, summary, whole

DEFAULT_COUNT = 50
MAX_COUNT = 1000

Name = Annotated[str, Path(description="x-baton-request-id of an answer, the answer's own id, or that of a job")]


def add(admin: APIRouter, gateway: Gateway) -> None:
    records, losses = gateway.routing.records, gateway.routing.losses

    def offset_s() -> float:
        return gateway.wall_clock() - asyncio.get_running_loop().time()

    def found(name: str) -> Sequence[Record]:
        if known := records.find(name):
            return known
        raise UnknownRequest(
            f"There is no request {name[:128]!r} among the last of this gateway: take the name from the header "
            "x-baton-request-id of its answer, and ask the gateway that gave it"
        )

    @admin.get("/requests")
    async def recent(limit: Annotated[str, Query()] = str(DEFAULT_COUNT)) -> Response:
        count = _count(limit)
        return json_response({"requests": [summary(one, offset_s()) for one in records.recent(count)]})

    @admin.get("/requests/{name:path}/cache")
    async def cache(name: Name) -> Response:
        jobs = [_explained(one, explain(one, records, losses)) for one in found(name) if one.choices]
        return json_response({"request_id": name, "jobs": jobs})

    @admin.get("/requests/{name:path}")
    async def request(name: Name) -> Response:
        return json_response({"request_id": name, "jobs": [whole(one, offset_s()) for one in found(name)]})

    @admin.get("/shadows")
    async def shadows() -> Response:
        return json_response({"shadows": [shadow_view(one) for one in gateway.routing.shadows]})


def _count(limit: str) -> int:
    if limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_COUNT:
        return int(limit)
    raise InvalidRequest(f"'limit' is {limit[:32]!r}: it must be a number from 1 to {MAX_COUNT}", param="limit")


def _explained(record: Record, miss: Any) -> dict[str, Any]:
    return {"job": record.job.request_id, "prompt_tokens": record.num_prompt_tokens, "miss": miss}
