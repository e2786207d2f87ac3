"""The fleet, worker by worker.

- GET /admin/status and /admin/kv: the workers, with the tickets, lanes and tiers that each reports
- POST /admin/lanes/probe: proves one lane
- POST /admin/workers/{id}/drain: no new work for a worker; its requests move on or finish, then it ends
- /admin/profile: POST begins to record the steps of all workers, GET reads them, DELETE ends it
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError, NotFound, UnsupportedParameter
from protos.values import Profile, WorkerRole
from router.dispatch.lane_probe import PROBE_TIMEOUT_S, probe_lane
from router.fleet.fleet import Fleet
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Query
from router.jobs import WorkerView

STATS_TIMEOUT_S = 2.0
STAND_INS = {
    WorkerRole.PREFILL: "the others read prompts themselves meanwhile",
    WorkerRole.DECODE: "the others stand in and serve whole requests meanwhile",
}
"""The fallback while a pool has no ready worker."""


async def status(gateway: Gateway, request: Request) -> Response:
    summary: dict[str, Any] = {
        "model": gateway.card.name, "ready": gateway.ready(), "reason": not_ready(gateway),
        "models": [model.card.name for model in gateway.each], "asleep": gateway.fleet.asleep(),
    }  # fmt: skip
    cards = gateway.revisions.cards if gateway.revisions is not None else {"": gateway.card}
    summary["digests"] = {revision: card.digests for revision, card in cards.items()}
    workers = gateway.fleet.status()
    summary["degraded"] = degraded(gateway)
    summary["troubles"] = own_troubles(gateway)
    summary["capacity"], *replies = await asyncio.gather(
        desired_fleet(gateway), *(held(gateway, worker.worker_id) for worker in workers)
    )
    kv = {worker.worker_id: reply for worker, reply in zip(workers, replies, strict=True)}
    return json_response(summary | {"workers": workers, "kv": kv, "processes": gateway.replica_ports})


async def desired_fleet(gateway: Gateway) -> Any:
    """Returns None without an owner, or if it does not answer in time."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return msgspec.to_builtins(await gateway.fleet_owner.view())
    except (BatonError, TimeoutError):
        return None


def degraded(gateway: Gateway) -> str:
    """Returns the faults despite which requests may be served, or ""."""
    shared = own_troubles(gateway)
    if not gateway.models:
        return "; ".join(filter(None, (gateway.fleet.degraded(), *shared, missing(gateway))))
    own = [f"{model.card.name}: {fault}" for model in gateway.models for fault in _own_faults(model)]
    return "; ".join(filter(None, (*shared, *own)))


def own_troubles(gateway: Gateway) -> Sequence[str]:
    ledger = gateway.ledger.store.trouble if gateway.ledger is not None else ""
    batches = gateway.batches.trouble if gateway.batches is not None else ""
    failing = [f"{name}: {trouble}" for name, trouble in (("ledger", ledger), ("batches", batches)) if trouble]
    return tuple(filter(None, (gateway.access.trouble, *failing)))


def _own_faults(gateway: Gateway) -> Sequence[str]:
    reasons = (not_ready(gateway), gateway.fleet.degraded(), missing(gateway))
    return tuple(dict.fromkeys(filter(None, reasons)))


def not_ready(gateway: Gateway) -> str:
    """Returns why a request would not be served now, or ""."""
    if gateway.models:
        each = {model.card.name: not_ready(model) for model in gateway.models}
        return "; ".join(f"{name}: {why}" for name, why in each.items()) if all(each.values()) else ""
    if gateway.fleet.ready():
        return ""
    if asleep := gateway.fleet.asleep():
        return asleep
    workers = gateway.fleet.status()
    away = [worker for worker in workers if worker.state != "ready"]
    reasons = [_described(worker) for worker in away]
    return "; ".join(reasons) or "no worker has joined yet"


def missing(gateway: Gateway, workers: Sequence[WorkerView] | None = None) -> str:
    """Names pools without a ready worker and workers that are lost or were never connected, or returns ""."""
    if not gateway.fleet.ready():
        return ""
    if workers is None:
        workers = gateway.fleet.status()
    unmet = "; ".join(_described(worker) for worker in workers if worker.info is None)
    reasons = [f"never met: {unmet}"] if unmet else []
    for role, meanwhile in STAND_INS.items():
        pool = [worker for worker in workers if worker.info is not None and worker.info.role is role]
        if pool and not any(worker.state == "ready" for worker in pool):
            away = "; ".join(_described(worker) for worker in pool)
            reasons.insert(0, f"no {role} worker is ready, {meanwhile}: {away}")
        else:
            reasons += [_described(worker) for worker in pool if worker.state == "lost"]
    return "; ".join(reasons)


def _described(worker: WorkerView) -> str:
    return f"{worker.worker_id} is {worker.state}{f' ({worker.reason})' if worker.reason else ''}"


async def held(gateway: Gateway, worker_id: str) -> dict[str, Any] | None:
    """None if the worker does not answer in time."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            stats = await gateway.fleet.stats(worker_id)
    except (BatonError, TimeoutError):
        return None
    return {"tickets": stats.tickets, "lanes": stats.lanes, "tiers": stats.tiers}


async def drain(gateway: Gateway, request: Request) -> Response:
    worker_id = request.path_params["worker_id"]
    num_running = await gateway.fleet.drain(worker_id)
    return json_response({"worker_id": worker_id, "num_running": num_running}, status=202)


async def profile(gateway: Gateway, request: Request) -> Response:
    """POST begins a recording, or restarts a running one and returns it; DELETE ends it."""
    await _refuse_parameters(request)
    recording = {"POST": True, "DELETE": False}.get(request.method)
    ids = [worker.worker_id for worker in gateway.fleet.status()]
    profiles = await asyncio.gather(*(_steps(gateway, worker_id, recording) for worker_id in ids))
    pairs = zip(ids, profiles, strict=True)
    return json_response({"workers": [{"worker_id": worker_id, "profile": steps} for worker_id, steps in pairs]})


async def _steps(gateway: Gateway, worker_id: str, recording: bool | None) -> Profile | None:
    """Returns None for a worker that does not answer, so that the others' steps are still shown."""
    try:
        return await gateway.fleet.profile(worker_id, recording)
    except BatonError:
        return None


async def _refuse_parameters(request: Request) -> None:
    """Raises UnsupportedParameter: a recording lasts until DELETE, so that a number of steps would be ignored."""
    name = next(iter(request.query_params), "body" if await request.body() else "")
    if name:
        raise UnsupportedParameter(
            f"/admin/profile takes no {name}: POST begins a recording, GET reads it, DELETE ends it", param=name
        )


MIN_TIMEOUT_S = 0.1


class ProbeQuery(Query):
    source: str = Field(description="a worker's name")
    destination: str = Field(description="a worker's name")
    num_tokens: int = Field(default=64, ge=1, le=10**6, description="a whole number from 1 to 1000000")
    timeout_s: float = Field(
        default=PROBE_TIMEOUT_S, ge=MIN_TIMEOUT_S, le=PROBE_TIMEOUT_S,
        description=f"{MIN_TIMEOUT_S:g} to {PROBE_TIMEOUT_S:g} seconds",
    )  # fmt: skip


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


async def probe(gateway: Gateway, request: Request, asked: ProbeQuery) -> Response:
    """Answers 429 if the source does not compute the prompt in time, 504 if its KV does not arrive; `timeout_s` is
    for both."""
    fleet = gateway.fleet
    if not isinstance(fleet, Fleet):
        raise NotFound("this gateway has no lanes")
    source = fleet.named(asked.source, param="source")
    destination = fleet.named(asked.destination, param="destination")
    ends = source.worker_id, destination.worker_id
    _, before_s = await _lane(fleet, *ends)
    gateway_id, num_tokens = fleet.offers.gateway_id, asked.num_tokens
    reading = await probe_lane(source, destination, num_tokens, gateway_id=gateway_id, timeout_s=asked.timeout_s)
    transport, busy_s = await _lane(fleet, *ends)
    return json_response(asdict(reading) | {"transport": transport, "lane_s": max(0.0, busy_s - before_s)})


async def _lane(fleet: Fleet, source: str, destination: str) -> tuple[str, float]:
    """Returns "" and 0 while there is no lane."""
    lanes = [lane for lane in (await fleet.stats(source)).lanes if lane.peer.partition("#")[0] == destination]
    return (lanes[0].transport, lanes[0].busy_s) if lanes else ("", 0.0)
