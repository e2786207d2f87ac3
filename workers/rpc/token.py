"""Checks the token of a worker's run in every call, Health and Describe included."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos.errors import Unauthenticated
from protos.grpc_status import abort_with
from protos.tls import TOKEN_KEY, token_metadata

log = logging.getLogger("baton.worker")


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects a call without the token with UNAUTHENTICATED, before any of its content is read."""

    def __init__(self, token: str) -> None:
        ((_, value),) = token_metadata(token)
        self._expected = value.encode()
        self._has_refused = False
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)  # fits every kind of method

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        shown = next((value for name, value in details.invocation_metadata or () if name == TOKEN_KEY), "")
        if hmac.compare_digest(shown.encode(), self._expected):
            return await continuation(details)
        return self._refusal

    async def _refuse(self, messages: Any, context: Any) -> None:
        level = logging.DEBUG if self._has_refused else logging.WARNING
        self._has_refused = True
        log.log(level, "refused a call from %s without this run's token", context.peer())
        await abort_with(
            context,
            Unauthenticated(
                "this worker answers only calls with its run's token, as `authorization: Bearer TOKEN` in their "
                "metadata: `baton gateway --token TOKEN`, or peers.token in its file"
            ),
        )
