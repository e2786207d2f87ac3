"""A response's connection: what is written in one turn of the event loop leaves by one system call, and chunks go there
straight, for all that ASGI's layers do to one between others is to pass it on.

    head, first chunk ── send ─▶ ASGI's layers ─▶ uvicorn ─┬─▶ connection
    chunks after it ──── Outlet.write ─────────────────────┘
    last chunk, end ──── send ─▶ ...

`HttpProtocol` is `router.http.protocol`'s with an outlet in the scope of each request. Under any other server there is
none, and every chunk goes through `send`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from protos.errors import BatonError
from router.http.protocol import Intake

_EXTENSION = "baton.outlet"
_TCP_INFO = struct.Struct("=24xI92xQ16xI")  # of Linux's struct tcp_info: unacked, bytes_acked, notsent_bytes
_MAX_CORKED_BYTES = 64 * 1024


class Corked:
    """A transport, as uvicorn's cycle of one response uses it. A head and its body are two writes, a last event and the
    end of the response two more: what is written is kept until the loop's next turn, or until it is much."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._close = close
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_CORKED_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            together = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._num_bytes = 0
            if not self.is_closing():
                self._transport.write(together)

    def abort(self) -> None:
        self._parts.clear()
        self._num_bytes = 0
        self._transport.abort()

    def close(self) -> None:
        self.flush()
        self._close()

    def get_write_buffer_size(self) -> int:
        return self._num_bytes + self._transport.get_write_buffer_size()


class Outlet:
    """The connection of one response."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._write = cycle.transport.write
        self._is_closing = cycle.transport.is_closing
        self._on_lost: Callable[[], None] | None = None

    @contextmanager
    def watched(self, on_lost: Callable[[], None]) -> Iterator[None]:
        """`on_lost` is called if the connection is lost meanwhile."""
        self._on_lost = on_lost
        try:
            if self._is_closing():
                on_lost()
            yield
        finally:
            self._on_lost = None

    @property
    def has_all(self) -> bool:
        """Of the request's body."""
        return not self._cycle.more_body

    def is_of(self, cycle: RequestResponseCycle) -> bool:
        return self._cycle is cycle

    def lost(self) -> None:
        self._cycle.disconnected = not self._cycle.response_complete
        if self._on_lost is not None:
            self._on_lost()

    def leave(self) -> None:
        """The scope, once the response is over: no circle is left for the collector."""
        if self._cycle.response_complete:
            self._cycle.scope["extensions"].pop(_EXTENSION, None)

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
        meanwhile. To be written to while the outlet `is_empty`, and only then. None for one that is encrypted, and
        where this process may have no more of them."""
        transport = self._transport
        if transport.get_extra_info("sslcontext") is not None or (found := transport.get_extra_info("socket")) is None:
            return None
        try:
            return os.dup(found.fileno())
        except OSError:
            return None

    def progress(self) -> int | None:
        """A number that changes when the client's kernel takes bytes; None once it has taken all that was sent. A full
        buffer of the transport shows a client that does not read too late: before that our own kernel takes more than
        an answer has (2.6 MB on a loopback connection, and 250 bytes a token). Slow readers it shows wrongly, for it
        empties only when a third of the kernel's is free."""
        if self._is_closing():
            return None
        num_waiting = self._transport.get_write_buffer_size()
        found = self._transport.get_extra_info("socket")
        try:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            unacked, taken, unsent = _TCP_INFO.unpack(info)
        except (AttributeError, OSError, struct.error):  # not Linux, or no TCP
            return num_waiting or None
        return int(taken) if unacked or unsent or num_waiting else None

    def abort(self) -> None:
        """Ends the connection at once: what it has not sent yet is dropped, by the kernel too, which would keep it for
        many minutes for a client that does not read."""
        if self._is_closing():
            return
        if (found := self._transport.get_extra_info("socket")) is not None:
            with suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def finish(self, rest: bytes) -> None:
        """The end of a chunk that the descriptor has taken the beginning of."""
        if not self._is_closing():
            self._write(rest)


class HttpProtocol(Intake):
    """For uvicorn's `http` setting."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._corked: Any = Corked(transport, self.loop, self._end)
        self._outlets: list[Outlet] = []  # of the requests that came in a pipeline: uvicorn tells the last one only

    def data_received(self, data: bytes) -> None:
        self._corked.flush()  # before whatever this connection's next word is answered with
        super().data_received(data)

    def shutdown(self) -> None:
        self._corked.flush()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for outlet in self._outlets:
            outlet.lost()

    def on_response_complete(self) -> None:
        for outlet in self._outlets:
            outlet.leave()
        super().on_response_complete()

    def _end(self) -> None:
        """After an answer that is the connection's last one."""
        if self._unanswered and self._unanswered[0].more_body:
            self.linger()
        else:
            self.transport.close()

    def _write_refusal(self, error: BatonError) -> None:
        self._corked.flush()
        super()._write_refusal(error)

    def _withdraw(self, cycle: RequestResponseCycle) -> None:
        super()._withdraw(cycle)
        for outlet in self._outlets:
            if outlet.is_of(cycle):
                outlet.lost()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = self._corked
            outlet = Outlet(self.cycle)
            if before is None or before.response_complete:
                self._outlets.clear()
            self._outlets.append(outlet)
            extensions: dict[str, Any] = self.cycle.scope.setdefault("extensions", {})
            extensions[_EXTENSION] = outlet


def outlet_of(scope: Mapping[str, Any]) -> Outlet | None:
    """None under a server without outlets."""
    found = (scope.get("extensions") or {}).get(_EXTENSION)
    return found if isinstance(found, Outlet) else None
