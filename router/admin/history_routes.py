"""GET /admin/history: the last hour, which the page at / draws."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.admin.door import seconds_of
from router.gateway import Gateway
from router.http.error_responses import json_response
from router.observe.history import PERIOD_S


async def history(gateway: Gateway, request: Request) -> Response:
    """`since` leaves out periods that ended then or before."""
    points = gateway.history.since(seconds_of(request, "since", 0))
    return json_response({"period_s": PERIOD_S, "points": points})
