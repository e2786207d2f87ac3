"""The one door in front of every route under /admin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.gateway import Gateway

Endpoint = Callable[[Request], Awaitable[Response]]


class AdminRoutes:
    """Adds routes under /admin to the application; each raises Unauthenticated or Forbidden for a request without an
    administrator's key."""

    def __init__(self, app: FastAPI, gateway: Gateway) -> None:
        self._app = app
        self._access = gateway.access

    def route(self, path: str, *, methods: Sequence[str] = ("GET",)) -> Callable[[Endpoint], Endpoint]:
        def added(endpoint: Endpoint) -> Endpoint:
            @wraps(endpoint)
            async def guarded(request: Request) -> Response:
                self._access.check_admin(request.headers.get("authorization"))
                return await endpoint(request)

            self._app.add_route(f"/admin{path}", guarded, methods=list(methods))
            return endpoint

        return added
