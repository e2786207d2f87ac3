"""/admin/adapters: LoRA adapters of a running fleet. GET lists them, POST loads one, DELETE unloads one."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from router.admin.door import AdminRoutes
from router.gateway import Gateway
from router.http.body import read_body
from router.http.body_validation import Body
from router.http.error_responses import json_response
from router.jobs import AdapterReport


class AdapterBody(Body):
    """`path` is a folder on the workers' machines."""

    name: str = Field(min_length=1, max_length=128, description="the model's name in requests")
    path: str = Field(min_length=1, max_length=4096, description="the adapter's folder on the workers' machines")


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    @admin.route("/adapters", "LoRA adapters, and the workers that have them")
    @admin.route("/adapters", "Every worker loads a LoRA adapter", method="POST", body=AdapterBody)
    async def adapters(request: Request) -> Response:
        """A POST is answered once the workers have the adapter."""
        if request.method == "GET":
            return json_response({"adapters": _rows(gateway)})
        body = await read_body(request, AdapterBody, gateway.card)
        gateway.check_adapter_name(body.name)
        return _report(body.name, await gateway.fleet.load_adapter(body.name, body.path))

    @admin.route("/adapters/{name}", "No worker takes requests for a LoRA adapter", method="DELETE")
    async def unload(request: Request) -> Response:
        name = request.path_params["name"]
        return _report(name, await gateway.fleet.unload_adapter(name))


def _report(name: str, report: AdapterReport) -> Response:
    return json_response({"name": name, "done": sorted(report.done), "failed": dict(report.failed)})


def _rows(gateway: Gateway) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for worker in gateway.fleet.status():
        for one in worker.info.adapters if worker.info is not None else ():
            row = {
                "name": one.name, "adapter_id": one.adapter_id, "path": one.path, "rank": one.rank,
                "num_bytes": one.num_bytes, "workers": [],
            }  # fmt: skip
            rows.setdefault((one.name, one.adapter_id, one.path), row)["workers"].append(worker.worker_id)
    return [rows[key] for key in sorted(rows)]
