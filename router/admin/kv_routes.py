"""GET /admin/kv: every ticket, lane and tier of every worker, queried from the workers. POST /admin/lanes/probe: proves
one lane."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, NotFound
from router.admin.status_routes import held
from router.dispatch.lane_probe import PROBE_TIMEOUT_S, probe_lane
from router.faces.endpoint import query_parameter
from router.fleet.fleet import Fleet
from router.gateway import Gateway
from router.http.error_responses import json_response

MAX_DIGITS = 9
MIN_TIMEOUT_S = 0.1
_SECONDS = re.compile(r"[0-9]{1,3}(\.[0-9]{1,20})?")
PROBE_QUERY = (
    query_parameter("source", {"type": "string"}, required=True),
    query_parameter("destination", {"type": "string"}, required=True),
    query_parameter("num_tokens", {"type": "integer", "minimum": 1, "maximum": 10**6, "default": 64}),
    query_parameter("timeout_s", {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": PROBE_TIMEOUT_S}),
)
SILENT = {"tickets": None, "lanes": None, "tiers": None}


async def kv(gateway: Gateway, request: Request) -> Response:
    """`tickets`, `lanes` and `tiers` are null for a worker that does not answer in time."""
    workers = gateway.fleet.status()
    replies = await asyncio.gather(*(held(gateway, worker.worker_id) for worker in workers))
    tickets = [ticket for reply in replies if reply is not None for ticket in reply["tickets"]]
    reserved = [ticket for ticket in tickets if ticket.direction == "in"]
    return json_response(
        {
            "num_tickets": len(tickets),
            "num_bytes_reserved": sum(ticket.num_bytes for ticket in reserved),
            "oldest_s": max((ticket.age_s for ticket in tickets), default=0.0),
            "workers": [
                {"worker_id": worker.worker_id, "state": worker.state} | (reply or SILENT)
                for worker, reply in zip(workers, replies, strict=True)
            ],
        }
    )


async def probe(gateway: Gateway, request: Request) -> Response:
    """Answers 429 if the source does not compute the prompt in time, 504 if its KV does not arrive; `timeout_s` is
    for both."""
    fleet, asked = gateway.fleet, request.query_params
    if not isinstance(fleet, Fleet):
        raise NotFound("this gateway has no lanes")
    num_tokens = asked.get("num_tokens", "64")
    if not num_tokens.isdecimal() or len(num_tokens) > MAX_DIGITS or not int(num_tokens):
        raise InvalidRequest(f"num_tokens={num_tokens[:40]}: give a whole number above 0", param="num_tokens")
    timeout_s = _timeout_s(asked.get("timeout_s"))
    source, destination = (fleet.named(asked.get(name, ""), param=name) for name in ("source", "destination"))
    ends = source.worker_id, destination.worker_id
    _, before_s = await _lane(fleet, *ends)
    reading = await probe_lane(source, destination, int(num_tokens), gateway_id=fleet.gateway_id, timeout_s=timeout_s)
    transport, busy_s = await _lane(fleet, *ends)
    return json_response(asdict(reading) | {"transport": transport, "lane_s": max(0.0, busy_s - before_s)})


def _timeout_s(given: str | None) -> float:
    if given is None:
        return PROBE_TIMEOUT_S
    if not _SECONDS.fullmatch(given) or not MIN_TIMEOUT_S <= float(given) <= PROBE_TIMEOUT_S:
        problem = f"timeout_s={given[:40]}: give {MIN_TIMEOUT_S:g} to {PROBE_TIMEOUT_S:g} seconds"
        raise InvalidRequest(problem, param="timeout_s")
    return float(given)


async def _lane(fleet: Fleet, source: str, destination: str) -> tuple[str, float]:
    """Returns "" and 0 while there is no lane."""
    lanes = [lane for lane in (await fleet.stats(source)).lanes if lane.peer.partition("#")[0] == destination]
    return (lanes[0].transport, lanes[0].busy_s) if lanes else ("", 0.0)
