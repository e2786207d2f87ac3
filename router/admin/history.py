"""GET /admin/history: the last hour, which the page at / draws."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.admin.door import AdminRoutes, seconds_of
from router.gateway import Gateway
from router.history.history import PERIOD_S, HistoryPeriod, merged, view
from router.http.errors import json_response
from router.metrics import GAP_SECONDS, SECONDS
from router.replicas.peers import from_other_process


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    @admin.route("/history")
    async def history(request: Request) -> Response:
        """`since` leaves out periods that ended then or before. Another process gets the counts themselves."""
        mine = gateway.history.since(seconds_of(request, "since", 0))
        if from_other_process(request):
            return json_response(msgspec.to_builtins(mine))
        replies = (await gateway.processes.ask(request)).values()
        periods = merged([mine, *(msgspec.convert(reply, list[HistoryPeriod]) for reply in replies)])
        points = [view(one, SECONDS, GAP_SECONDS) for one in periods]
        return json_response({"period_s": PERIOD_S, "points": points})
