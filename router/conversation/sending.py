"""An answer on its way to the client: whole, or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from protos.errors import BatonError
from router.conversation.parts import Ignored
from router.gateway import Gateway
from router.http.errors import json_response
from router.http.response_channel import ResponseChannel
from router.http.sse import EventStream, while_connected
from router.metrics import Track


class SentAnswer(Protocol):
    def events(self, track: Track, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]: ...

    async def whole(self, track: Track) -> dict[str, Any]: ...


async def send(
    gateway: Gateway,
    request: Request,
    track: Track,
    answer: SentAnswer,
    *,
    stream: bool,
    ignored: Ignored | None = None,
    failure: Callable[[BatonError], bytes] | None = None,
) -> Response | EventStream:
    """Names in `ignored` go into a header. `failure` as in `EventStream`. Raises Cancelled when the client goes
    away."""
    if stream:
        return EventStream(
            partial(answer.events, track),
            track,
            keep_alive_s=gateway.keep_alive_s,
            stall_s=gateway.stall_s,
            headers=ignored.raw_headers() if ignored is not None else (),
            failure=failure,
        )
    whole = await while_connected(request.scope, request.receive, answer.whole(track))
    return json_response(whole, headers=ignored.headers() if ignored is not None else None)
