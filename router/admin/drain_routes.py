"""POST /admin/workers/{id}/drain: no new work for a worker; what runs moves on, or finishes; then it ends."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from router.gateway import Gateway
from router.http.error_responses import json_response


async def drain(gateway: Gateway, request: Request) -> Response:
    worker_id = request.path_params["worker_id"]
    num_running = await gateway.fleet.drain(worker_id)
    return json_response({"worker_id": worker_id, "num_running": num_running}, status=202)
