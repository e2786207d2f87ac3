"""POST /admin/workers/{id}/drain: no new work for a worker; what runs moves on, or finishes; then it ends."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from router.gateway import Gateway
from router.http.errors import json_response


def add(admin: APIRouter, gateway: Gateway) -> None:
    @admin.post("/workers/{worker_id}/drain")
    async def drain(worker_id: str) -> Response:
        num_running = await gateway.fleet.drain(worker_id)
        return json_response({"worker_id": worker_id, "num_running": num_running}, status=202)
