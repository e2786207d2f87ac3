"""The endpoints that answer with tokens, reached past FastAPI: it describes them, and its layers would cost a short
request as much as all that is done for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.errors import BatonError
from router.openai.errors import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class Straight:
    """Answers a POST to one of the paths, as their routes would; everything else goes on."""

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except BatonError as error:
            response = error_response(error)
        await response(scope, receive, send)
