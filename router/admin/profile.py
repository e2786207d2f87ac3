"""/admin/profile. POST: all workers record their steps. GET: what they have so far. DELETE: that, and the end of it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from protos.errors import BatonError
from protos.values import Profile
from router.gateway import Gateway
from router.http.errors import json_response


def add(admin: APIRouter, gateway: Gateway) -> None:
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

    @admin.post("/profile")
    async def begin() -> Response:
        """A recording under way begins anew: there is one, whoever asks. It answers with what that had."""
        return await told(True)

    @admin.get("/profile")
    async def look() -> Response:
        return await told(None)

    @admin.delete("/profile")
    async def end() -> Response:
        return await told(False)
