"""uvicorn's protocol with limits on a request's head, and a `ResponseChannel` in the scope of each request.

    opened ──▶ head ──▶ body (`router.http.middleware.Gate`) ──▶ answer ──▶ idle (uvicorn) ──▶ the next head
      └─ HEAD_S ─┘

Data that is not a request never reaches the application: it is answered here, in the form of the API's errors.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protos.errors import BatonError, HeadersTooLarge, InvalidRequest, Unavailable
from router.http.access_log import is_logged, log_access
from router.http.error_responses import error_response
from router.http.response_channel import EXTENSION, CorkedTransport, ResponseChannel, WriteState
from router.log_throttle import RareLog

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
            self._wait_for_head()  # an answer is being written, which this must not end
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
