"""Adds a route that needs an administrator's key, and the moments in queries of such routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import InvalidRequest
from router.endpoint import Endpoint, Schema
from router.gateway import Gateway
from router.http.body_validation import Body
from router.ledger.organization import LATEST_S

Answer = Callable[[Request], Awaitable[Response]]
SECOND: Schema = {"type": "integer", "minimum": 0, "maximum": LATEST_S}


class AdminRoutes:
    """Collects endpoints, under /admin but for those that another API names."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []

    def route(
        self,
        path: str,
        summary: str,
        *,
        method: str = "GET",
        prefix: str = "/admin",
        body: type[Body] | None = None,
        query: Sequence[Schema] = (),
    ) -> Callable[[Answer], Answer]:
        def added(answer: Answer) -> Answer:
            async def serve(_: Gateway, request: Request) -> Response:
                return await answer(request)

            endpoint = Endpoint(method, f"{prefix}{path}", serve, summary, key="admin", body=body, query=query)
            self.endpoints.append(endpoint)
            return answer

        return added


def seconds_of(request: Request, name: str, default: int) -> int:
    """Whole seconds since 1970. Raises InvalidRequest."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 12 or int(given) > LATEST_S:
        raise InvalidRequest(f"{name}={given[:40]}: give whole seconds since 1970", param=name)
    return int(given)
