"""uvicorn's protocol with limits on a request's head, and a `ResponseChannel` in the scope of each request.

    opened ──▶ head ──▶ body (`router.http.middleware.Gate`) ──▶ answer ──▶ idle (uvicorn) ──▶ the next head
      └─ HEAD_S ─┘

    head, first chunk ── send ─▶ ASGI's layers ─▶ uvicorn ─┬─▶ CorkedTransport ─▶ transport
    chunks after it ──── ResponseChannel.write ────────────┘
    last chunk, end ──── send ─▶ ...

Chunks after a response's head go to the transport, where ASGI's layers would only pass them on. Under any other server
there is no channel, and every chunk goes through `send`."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from protos.errors import BatonError, HeadersTooLarge, InvalidRequest, Unavailable
from router.http.access_log import is_logged, log_access
from router.http.api import error_response
from router.log_throttle import RareLog

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
    """Joins small writes within one turn of the event loop to one system call: uvicorn writes a head and its body
    apart. `write_alone` is used when nothing waits."""

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


log = logging.getLogger("baton.http")

HEAD_S = 30.0
SPARE_FILES = 64
"""File descriptors that connections leave to workers' channels, databases and files."""
MAX_UNENDED_HEAD_BYTES = 512 * 1024
"""More bytes than the largest head plus one read: `middleware.Gate` counts heads that are complete exactly."""

_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
"""The offer to speak another protocol, which Java's client makes with each request: the parser would take the body for
that protocol. A server may pass the offer over (RFC 9110, 7.8)."""


class HttpProtocol(HttpToolsProtocol):
    """`crowded` logs connections that are refused for want of file descriptors."""

    def __init__(self, *args: Any, crowded: RareLog | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._crowded = crowded or RareLog(log)
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None  # set while a head is awaited or incomplete
        self._channels: list[ResponseChannel] = []  # of pipelined requests: uvicorn notifies only the last one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._corked: Any = CorkedTransport(transport, self.loop)
        self._wait_for_head()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and transport.get_extra_info("socket").fileno() >= limit - SPARE_FILES:
            self._crowded.note(
                f"connections are refused: this process may have {limit} files open, and nearly has: raise the limit "
                "(ulimit -n, LimitNOFILE)"
            )
            self._refuse(Unavailable("This gateway has too many connections: try again later", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)
        self._corked.state.block(WriteState.CLOSED)
        for channel in self._channels:
            channel.lost()

    def pause_writing(self) -> None:
        self._corked.state.block(WriteState.PAUSED)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._corked.state.unblock(WriteState.PAUSED)
        super().resume_writing()

    def shutdown(self) -> None:
        self._corked.flush()
        super().shutdown()

    # -- requests ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._corked.flush()  # must precede the next answer on this connection
        if self.transport.is_closing():
            return
        in_body = self._head_timer is None and self.cycle is not None and self.cycle.more_body
        if not in_body and b"pgrade:" in data:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_UNENDED_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"The headers have no end after {self._num_head_bytes} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # trailers are dropped: they were not there when the request was judged
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_wait()
        before = self.cycle
        super().on_headers_complete()
        if before is None or before.response_complete:
            self._channels.clear()
        self.cycle.transport = self._corked
        channel = ResponseChannel(self.cycle, self._corked)
        self._channels.append(channel)
        extensions: dict[str, Any] = self.cycle.scope.setdefault("extensions", {})
        extensions[EXTENSION] = channel

    def on_response_complete(self) -> None:
        for channel in self._channels:
            channel.leave()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # an answer is being written, which must not be ended
        else:
            self.transport.close()

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # -- refusals ------------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for data that is not an HTTP request."""
        self._refuse(InvalidRequest("This is not an HTTP request that can be read"))

    def _refuse(self, error: BatonError) -> None:
        self._corked.flush()
        if self.transport.is_closing():
            return
        if is_logged():
            client = self.client[0] if self.client else ""
            log_access("-", "-", error.http_status, 0.0, client=client, request="", tenant="", track=None)
        response = error_response(error)
        response.headers["connection"] = "close"
        head = [STATUS_LINE[response.status_code], *(b"%b: %b\r\n" % one for one in response.raw_headers)]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.transport.close()
