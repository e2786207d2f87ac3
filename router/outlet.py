"""Chunks of a response straight to its connection: all that ASGI's layers do to one between others is to pass it on.

    head, first chunk ── send ─▶ ASGI's layers ─▶ uvicorn ─┬─▶ connection
    chunks after it ──── Outlet.write ─────────────────────┘
    last chunk, end ──── send ─▶ ...

`HttpProtocol` is `router.intake`'s with an outlet in the scope of each request. Under any other server there is none,
and every chunk goes through `send`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.intake import Intake

_EXTENSION = "baton.outlet"


class Outlet:
    """The connection of one response."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
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
