"""Chunks of a response straight to its connection: all that ASGI's layers do to one between others is to pass it on.

    head, first chunk ── send ─▶ ASGI's layers ─▶ uvicorn ─┬─▶ connection
    chunks after it ──── Outlet.write ─────────────────────┘
    last chunk, end ──── send ─▶ ...

`HttpProtocol` is `router.intake`'s with an outlet in the scope of each request. Under any other server there is none,
and every chunk goes through `send`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.intake import Intake

_EXTENSION = "baton.outlet"


class Outlet:
    """The connection of one response."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._write = cycle.transport.write
        self._is_closing = cycle.transport.is_closing

    def write(self, chunk: bytes) -> bool:
        """False, and nothing is written, before the head and after the end, on a connection that closes, and while the
        client reads too slowly: then `send` has to wait for it. An empty chunk only asks: it would be the end."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        if self._is_closing():  # of requests in a pipeline uvicorn tells the last one only
            return False
        if chunk:
            self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    def is_empty(self) -> bool:
        """Would a chunk be written, and is none before it waiting for the connection?"""
        return self.write(b"") and not self._transport.get_write_buffer_size()

    def descriptor(self) -> int | None:
        """A new descriptor of the connection, the caller's to close: another connection never gets its number
        meanwhile. To be written to while the outlet `is_empty`, and only then. None for one that is encrypted."""
        transport = self._transport
        if transport.get_extra_info("sslcontext") is not None or (found := transport.get_extra_info("socket")) is None:
            return None
        return os.dup(found.fileno())

    def finish(self, rest: bytes) -> None:
        """The end of a chunk that the descriptor has taken the beginning of."""
        if not self._is_closing():
            self._write(rest)


class HttpProtocol(Intake):
    """For uvicorn's `http` setting."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            extensions: dict[str, Any] = self.cycle.scope.setdefault("extensions", {})
            extensions[_EXTENSION] = Outlet(self.cycle)


def outlet_of(scope: Mapping[str, Any]) -> Outlet | None:
    """None under a server without outlets."""
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    return found if isinstance(found, Outlet) else None
