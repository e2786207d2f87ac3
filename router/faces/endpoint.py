"""The rows of the table of endpoints, of which routes, keys, metrics, lines of batches and /openapi.json are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.types import ASGIApp

from router.gateway import Gateway
from router.http.api import OPENAI, Api, api_of
from router.http.body import Body, Query, read_body, read_query, session_of

Schema = dict[str, Any]
Serve = Callable[..., Awaitable[ASGIApp]]
"""Called with the gateway and the request; for a checked body, with the gateway of its model, the request and that;
for a query, with the gateway, the request and that."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The answer to one method at one path.

    - `track`: its name in metrics, spans and the ledger; "" if it generates nothing
    - `key`: whose key it needs; "": none
    - `is_upload`: its body may be as large as a file, and is read by `serve` itself
    - `body`, `form`, `query`: the request, for /openapi.json
    """

    method: str
    path: str
    serve: Serve
    summary: str
    _: KW_ONLY
    track: str = ""
    key: Literal["client", "admin", ""] = "client"
    is_upload: bool = False
    body: type[Body] | None = None
    form: type[Body] | None = None
    query: type[Query] | None = None

    async def answer(self, gateway: Gateway, request: Request) -> ASGIApp:
        """Raises what `serve` and `read_body` raise, and UnknownModel."""
        if self.query is not None:
            return await self.serve(gateway, request, read_query(request, self.query))
        if self.body is None or self.is_upload:
            return await self.serve(gateway, request)
        body: Any = await read_body(request, self.body, gateway.widest)
        request.scope["state"]["session"] = session_of(request.scope, body)
        if self.key == "client" and "model" in self.body.model_fields:
            name, tag = body.model, api_of(request.scope).model_tag
            if name is None:
                name = gateway.card.name
            elif tag and not gateway.serves(name):
                name = name.removesuffix(tag)
            gateway = gateway.serving(name, request.scope["state"].get("track"))
        return await self.serve(gateway, request, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """The endpoints with one API's form of answers. `absent`: why other paths, by their beginnings, do not exist."""

    endpoints: Sequence[Endpoint]
    api: Api = OPENAI
    absent: Mapping[str, str] = field(default_factory=dict)
