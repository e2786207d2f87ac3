"""The connection of one response: chunks after its head go to the transport, where ASGI's layers would only pass them
on.

    head, first chunk ── send ─▶ ASGI's layers ─▶ uvicorn ─┬─▶ CorkedTransport ─▶ transport
    chunks after it ──── ResponseChannel.write ────────────┘
    last chunk, end ──── send ─▶ ...

`router.http.protocol.HttpProtocol` puts one into the scope of each request. Under any other server there is none, and
every chunk goes through `send`.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "baton.response_channel"
_TCP_INFO = struct.Struct("=24xI92xQ16xI")  # fields of Linux's struct tcp_info: unacked, bytes_acked, notsent_bytes
_MAX_CORKED_BYTES = 64 * 1024


class WriteState(ctypes.Structure):
    """A transport as a `TokenSink` sees it. `sent_s`: the last write, by the loop's clock. `blocked`: a bit for each
    reason not to write."""

    _fields_ = (("sent_s", ctypes.c_double), ("blocked", ctypes.c_uint8))

    PAUSED, CORKED, CLOSED = 1, 2, 4

    def block(self, reason: int) -> None:
        self.blocked |= reason

    def unblock(self, reason: int) -> None:
        self.blocked &= ~reason


class CorkedTransport:
    """A transport whose small writes within one turn of the event loop leave by one system call: uvicorn writes a
    head and its body apart. `write_alone` passes by when nothing waits."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self.write_alone = transport.write
        self.state = WriteState()
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
            self.state.block(WriteState.CORKED)
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_CORKED_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            together = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._num_bytes = 0
            self.state.unblock(WriteState.CORKED)
            if not self.is_closing():
                self._transport.write(together)

    def abort(self) -> None:
        self.state.block(WriteState.CLOSED)
        self._parts.clear()
        self._num_bytes = 0
        self._transport.abort()

    def close(self) -> None:
        self.flush()
        self.state.block(WriteState.CLOSED)
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        return self._num_bytes + self._transport.get_write_buffer_size()


class ResponseChannel:
    """Chunks written here, and by `write_alone` while `state` blocks nothing, go past ASGI."""

    def __init__(self, cycle: RequestResponseCycle, transport: CorkedTransport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._is_closing = transport.is_closing
        self.flush = transport.flush
        self.state, self.write_alone = transport.state, transport.write_alone
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
        """Content-Length of the request."""
        return not self._cycle.more_body

    def lost(self) -> None:
        self._cycle.disconnected = not self._cycle.response_complete
        if self._on_lost is not None:
            self._on_lost()

    def leave(self) -> None:
        """Leaves the scope at the response's end, so that no reference cycle remains."""
        if self._cycle.response_complete:
            self._cycle.scope["extensions"].pop(EXTENSION, None)

    @property
    def is_clear(self) -> bool:
        """Whether a chunk may be written now; otherwise `send` waits for the client."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        return not self._is_closing()  # uvicorn notifies only the last one of pipelined requests

    def write(self, chunk: bytes, now: float) -> bool:
        """False if nothing was written. An empty chunk would be the response's end."""
        if not self.is_clear:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.state.sent_s = now
        return True

    def progress(self) -> int | None:
        """A number that changes when the client's kernel takes bytes; None once it has taken all. The transport's own
        buffer fills too late: our kernel takes more than an answer has."""
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
        """Ends the connection and drops unsent data, also the kernel's."""
        if self._is_closing():
            return
        if (found := self._transport.get_extra_info("socket")) is not None:
            with suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def channel_of(scope: Mapping[str, Any]) -> ResponseChannel | None:
    """None under a server without channels."""
    found = (scope.get("extensions") or {}).get(EXTENSION)
    return found if isinstance(found, ResponseChannel) else None
