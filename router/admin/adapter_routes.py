"""/admin/adapters: LoRA adapters of a running fleet. GET lists them, POST loads one, DELETE unloads one."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from router.gateway import Gateway
from router.http.body import read_body
from router.http.body_validation import Body
from router.http.error_responses import json_response
from router.jobs import AdapterReport


class AdapterBody(Body):
    """`path` is a folder on the workers' machines."""

    name: str = Field(min_length=1, max_length=128, description="the model's name in requests")
    path: str = Field(min_length=1, max_length=4096, description="the adapter's folder on the workers' machines")


async def list_adapters(gateway: Gateway, request: Request) -> Response:
    return json_response({"adapters": _rows(gateway)})


async def load(gateway: Gateway, request: Request) -> Response:
    """Answers once the workers have the adapter."""
    body = await read_body(request, AdapterBody, gateway.card)
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
