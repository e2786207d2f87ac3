"""The one door in front of every route under /admin, and the moments in their queries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest
from router.gateway import Gateway
from router.ledger.organization import LATEST_S

Endpoint = Callable[[Request], Awaitable[Response]]


class AdminRoutes:
    """Adds routes to the application, under /admin but for those that another API names. Each raises Unauthenticated or
    Forbidden for a request without an administrator's key."""

    def __init__(self, app: FastAPI, gateway: Gateway) -> None:
        self._app = app
        self._access = gateway.access

    def route(
        self, path: str, *, methods: Sequence[str] = ("GET",), prefix: str = "/admin"
    ) -> Callable[[Endpoint], Endpoint]:
        def added(endpoint: Endpoint) -> Endpoint:
            @wraps(endpoint)
            async def guarded(request: Request) -> Response:
                self._access.check_admin(request.headers.get("authorization"))
                return await endpoint(request)

            self._app.add_route(f"{prefix}{path}", guarded, methods=list(methods))
            return endpoint

        return added


def seconds_of(request: Request, name: str, default: int) -> int:
    """Whole seconds since 1970. Raises InvalidRequest."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 12 or int(given) > LATEST_S:
        raise InvalidRequest(f"{name}={given[:40]}: give whole seconds since 1970", param=name)
    return int(given)
