"""/admin/profile. POST: all workers record their steps. GET: what they have so far. DELETE: that, and the end of it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError, UnsupportedParameter
from protos.values import Profile
from router.gateway import Gateway
from router.http.error_responses import json_response


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
