"""Changes of the fleet.

- /admin/capacity: GET: the desired fleet, what serves, the latest changes and decisions. POST: another fleet
- /admin/adapters: GET lists the LoRA adapters of the running fleet, POST loads one, DELETE unloads one
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest, Misconfigured
from protos.values import WorkerRole
from router.fleet_owner import FleetOrder, OrderKind
from router.gateway import Gateway
from router.http.api import json_response
from router.http.body import Body
from router.jobs import AdapterReport

MAX_TEXT_CHARS = 300
MAX_PATH_CHARS = 4096
MAX_SETTINGS = 256
MAX_SURGE = 64
ROLES = Literal["prefill", "decode", "colocated"]


class CapacityBody(Body):
    """`scale`: the numbers of workers of the roles in `counts`. `flip`: the new `role` of `worker_id`. `roll`: workers
    with another `model`, or other `settings` by path, `surge` at a time. `abort`: back from a roll."""

    kind: Literal["scale", "flip", "roll", "abort"] = Field(description='"scale", "flip", "roll" or "abort"')
    counts: dict[ROLES, int] | None = Field(default=None, description="an object of roles and numbers of workers")
    worker_id: str | None = Field(default=None, max_length=MAX_TEXT_CHARS, description="a worker's name")
    role: Literal["prefill", "decode"] | None = Field(default=None, description='"prefill" or "decode"')
    model: str | None = Field(default=None, max_length=MAX_PATH_CHARS, description="the path of a model")
    settings: dict[str, str | int | float | bool] | None = Field(
        default=None, max_length=MAX_SETTINGS, description="an object of settings by path, such as worker.dtype"
    )
    surge: int = Field(default=1, ge=0, le=MAX_SURGE, description=f"a number from 0 to {MAX_SURGE}")
    who: str | None = Field(default=None, max_length=MAX_TEXT_CHARS, description="a string of 300 characters at most")
    why: str | None = Field(default=None, max_length=MAX_TEXT_CHARS, description="a string of 300 characters at most")

    def order(self) -> FleetOrder:
        """Raises InvalidRequest for an order without its parts."""
        if self.kind == "scale" and not self.counts:
            raise InvalidRequest("Missing required parameter: 'counts'.", param="counts")
        if self.kind == "roll" and not (self.model or self.settings):
            raise InvalidRequest("Missing required parameter: 'model' or 'settings'.", param="model")
        for name in ("worker_id", "role") if self.kind == "flip" else ():
            if not getattr(self, name):
                raise InvalidRequest(f"Missing required parameter: '{name}'.", param=name)
        return FleetOrder(
            kind=OrderKind(self.kind),
            counts={WorkerRole(role): count for role, count in (self.counts or {}).items()},
            worker_id=self.worker_id or "",
            role=WorkerRole(self.role) if self.role else None,
            model=self.model or "",
            settings=dict(self.settings or {}),
            surge=self.surge,
            who=self.who or "",
            why=self.why or "",
        )


async def capacity(gateway: Gateway, request: Request) -> Response:
    return json_response(msgspec.to_builtins(await gateway.fleet_owner.view()))


async def order(gateway: Gateway, _: Request, body: CapacityBody) -> Response:
    """Answers once the change is recorded, before it is reached."""
    change = await gateway.fleet_owner.order(await _with_files(body.order(), gateway))
    return json_response(msgspec.to_builtins(change), status=202)


async def sights(gateway: Gateway, _: Request) -> Response:
    """Gateways begin to report with the first call."""
    return json_response({"sights": msgspec.to_builtins(await gateway.fleet_owner.sights())})


async def _with_files(order: FleetOrder, gateway: Gateway) -> FleetOrder:
    """Adds the fingerprint of the order's model, which this gateway must be able to read. Raises InvalidRequest."""
    if not order.model or gateway.revisions is None:
        return order
    try:
        files = await asyncio.to_thread(gateway.revisions.check, Path(order.model))
    except Misconfigured as error:
        raise InvalidRequest(f"model: {error.message}", param="model") from error
    return replace(order, files=files)


class AdapterBody(Body):
    """`path` is a folder on the workers' machines."""

    name: str = Field(min_length=1, max_length=128, description="the model's name in requests")
    path: str = Field(min_length=1, max_length=4096, description="the adapter's folder on the workers' machines")


async def list_adapters(gateway: Gateway, request: Request) -> Response:
    return json_response({"adapters": _rows(gateway)})


async def load(gateway: Gateway, _: Request, body: AdapterBody) -> Response:
    """Answers once the workers have the adapter."""
    gateway.check_adapter_name(body.name)
    return _report(body.name, await gateway.fleet.load_adapter(body.name, body.path))


async def unload(gateway: Gateway, request: Request) -> Response:
    name = request.path_params["name"]
    return _report(name, await gateway.fleet.unload_adapter(name))


def _report(name: str, report: AdapterReport) -> Response:
    return json_response({"name": name, "done": sorted(report.done), "failed": dict(report.failed)})


def _rows(gateway: Gateway) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for worker in gateway.fleet.status():
        for adapter in worker.info.adapters if worker.info is not None else ():
            row = {
                "name": adapter.name, "adapter_id": adapter.adapter_id, "path": adapter.path, "rank": adapter.rank,
                "num_bytes": adapter.num_bytes, "workers": [],
            }  # fmt: skip
            rows.setdefault((adapter.name, adapter.adapter_id, adapter.path), row)["workers"].append(worker.worker_id)
    return [rows[key] for key in sorted(rows)]
