"""/admin/profile. POST: all workers record their steps. GET: what they have so far. DELETE: that, and the end of it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError, UnsupportedParameter
from protos.values import Profile
from router.admin.door import AdminRoutes
from router.gateway import Gateway
from router.http.error_responses import json_response


def add(admin: AdminRoutes, gateway: Gateway) -> None:
    async def ask(worker_id: str, recording: bool | None) -> Profile | None:
        """None of one that does not answer: the others' steps are worth having."""
        try:
            return await gateway.fleet.profile(worker_id, recording)
        except BatonError:
            return None

    async def told(recording: bool | None) -> Response:
        ids = [worker.worker_id for worker in gateway.fleet.status()]
        profiles = await asyncio.gather(*(ask(worker_id, recording) for worker_id in ids))
        pairs = zip(ids, profiles, strict=True)
        return json_response({"workers": [{"worker_id": worker_id, "profile": one} for worker_id, one in pairs]})

    @admin.route("/profile", "Every worker records its steps from now on", method="POST")
    @admin.route("/profile", "The steps recorded so far")
    @admin.route("/profile", "Ends the recording, and returns it", method="DELETE")
    async def profile(request: Request) -> Response:
        """POST begins a recording, or restarts a running one and returns it; DELETE ends it."""
        await _refuse_parameters(request)
        return await told({"POST": True, "DELETE": False}.get(request.method))


async def _refuse_parameters(request: Request) -> None:
    """Raises UnsupportedParameter: a recording lasts until DELETE, so that a number of steps would be ignored."""
    name = next(iter(request.query_params), "body" if await request.body() else "")
    if name:
        raise UnsupportedParameter(
            f"/admin/profile takes no {name}: POST begins a recording, GET reads it, DELETE ends it", param=name
        )
