"""GET /admin/kv: every ticket, lane and tier of every worker, queried from the workers."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from router.admin.door import AdminRoutes
from router.admin.status import held
from router.gateway import Gateway
from router.http.errors import json_response

SILENT = {"tickets": None, "lanes": None, "tiers": None}


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    @admin.route("/kv")
    async def kv(request: Request) -> Response:
        """`tickets`, `lanes` and `tiers` are null for a worker that does not answer in time. Bytes of "in" tickets are
        reserved memory; those of "out" tickets are still at their owner."""
        workers = gateway.fleet.status()
        replies = await asyncio.gather(*(held(gateway, worker.worker_id) for worker in workers))
        tickets = [ticket for one in replies if one is not None for ticket in one["tickets"]]
        kept = [ticket for ticket in tickets if ticket.direction == "in"]
        return json_response(
            {
                "num_tickets": len(tickets),
                "num_bytes_reserved": sum(ticket.num_bytes for ticket in kept),
                "oldest_s": max((ticket.age_s for ticket in tickets), default=0.0),
                "workers": [
                    {"worker_id": worker.worker_id, "state": worker.state} | (one or SILENT)
                    for worker, one in zip(workers, replies, strict=True)
                ],
            }
        )
