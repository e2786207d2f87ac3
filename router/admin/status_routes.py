"""GET /admin/status: the fleet, worker by worker, with what each holds for others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError
from protos.values import WorkerRole
from router.gateway import Gateway
from router.http.error_responses import json_response
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
