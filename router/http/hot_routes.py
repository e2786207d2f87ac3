"""The endpoints that answer with tokens, reached past FastAPI: it describes them, and its layers would cost a short
request as much as all that is done for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from protos.errors import BatonError
from router.http.errors import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class Straight(FastAPI):
    """Answers a POST to one of the `go_straight` paths behind the same layers as everything else, and nothing more. A
    HEAD is answered as a GET, whose body the server keeps (RFC 9110, 9.3.2): FastAPI's routes answer none, and monitors
    send them."""

    def __init__(self, *, layers: Sequence[Middleware], title: str) -> None:
        # The pages of documentation would load scripts from the network; /openapi.json is all they are made of.
        super().__init__(title=title, docs_url=None, redoc_url=None, middleware=list(layers))
        self._endpoints: Mapping[str, Endpoint] = {}
        self._answering: ASGIApp = self._answer
        for layer, args, kwargs in reversed(layers):
            self._answering = layer(self._answering, *args, **kwargs)

    def go_straight(self, endpoints: Mapping[str, Endpoint]) -> None:
        """By their paths."""
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints:
            await self._answering(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "HEAD":
            scope.setdefault("state", {})["method"] = "HEAD"
            await super().__call__({**scope, "method": "GET"}, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._endpoints[scope["path"]](Request(scope, receive, send))
        except BatonError as error:
            response = error_response(error)
        await response(scope, receive, send)
