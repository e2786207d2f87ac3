"""POST /admin/workers/{id}/drain: no new work for a worker; what runs moves on, or finishes; then it ends."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.admin.door import AdminRoutes
from router.gateway import Gateway
from router.http.error_responses import json_response


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    @admin.route(
        "/workers/{worker_id}/drain",
        "No new work for a worker: what runs moves on or finishes, then it ends",
        method="POST",
    )
    async def drain(request: Request) -> Response:
        worker_id = request.path_params["worker_id"]
        num_running = await gateway.fleet.drain(worker_id)
        return json_response({"worker_id": worker_id, "num_running": num_running}, status=202)
