"""A small HTTP/1.1 client that timestamps an event when its bytes arrive, not when a task resumes.

General clients spend more CPU on a chunk than the server does, and often share two cores with it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools
import httpx

from cluster.cli.admin_client import root_of

MAX_ERROR_BYTES = 65536
MAX_IDLE_S = 2.0
"""Servers close idle connections after 5 s or more; a request sent at that moment would fail."""

_RETRY_AFTER = {b"retry-after": 1.0, b"retry-after-ms": 0.001}

OnEvent = Callable[[bytes, float], None]
"""Called with an event's data and its arrival time."""


class Opener(Protocol):
    """Opens a connection for a protocol; raises OSError."""

    async def __call__(self, protocol: Callable[[], Connection]) -> Connection: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEndpoint:
    """A server's root, such as http://127.0.0.1:8000; a trailing /v1 is taken off."""

    url: str
    host: str
    port: int
    secure: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> HttpEndpoint:
        """Raises Misconfigured."""
        root = root_of(url)
        parts = httpx.URL(root)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return cls(url=root, host=parts.host, port=port, secure=secure, path=parts.path.rstrip("/"))

    async def __call__(self, protocol: Callable[[], Connection]) -> Connection:
        secured = ssl.create_default_context() if self.secure else None
        _, made = await asyncio.get_running_loop().create_connection(protocol, self.host, self.port, ssl=secured)
        return made


@dataclass(slots=True)
class HttpReply:
    """`body`: the beginning, unless the status is 200."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    retry_after_s: float | None = None


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._on_event: OnEvent | None = None
        self._reply = HttpReply()
        self._line = bytearray()
        self._now = 0.0
        self._done: asyncio.Future[HttpReply] | None = None
        self.reusable = True

    def send(self, request: bytes, on_event: OnEvent) -> asyncio.Future[HttpReply]:
        """The result fails with ConnectionError or httptools' error if the answer is cut off."""
        assert self._transport is not None
        assert self._done is None, "the last answer has not ended"
        self._parser = httptools.HttpResponseParser(self)
        self._on_event, self._reply, self._line = on_event, HttpReply(), bytearray()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    @property
    def busy(self) -> bool:
        return self._done is not None

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # the server sent data without a request
            self.abort()
            return
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(ConnectionResetError(f"the server closed the connection{f': {exc}' if exc else ''}"))

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        unit_s = _RETRY_AFTER.get(name.lower())
        if unit_s is not None and value.isdigit() and len(value) < 16:  # a date, or longer than a client would wait
            wait_s = int(value) * unit_s
            self._reply.retry_after_s = min(wait_s, self._reply.retry_after_s or wait_s)  # whole seconds are rounded up

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reply.status != 200:
            self._reply.body += body[: MAX_ERROR_BYTES - len(self._reply.body)]
            return
        self._line += body
        *lines, rest = self._line.split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:") and self._on_event is not None:
                self._on_event(bytes(line[5:].strip()), self._now)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(self._reply)
        else:
            done.set_exception(error)


class Connections:
    """Reuses idle connections."""

    def __init__(self, open_one: Opener, clock: Callable[[], float]) -> None:
        self._open = open_one
        self._clock = clock
        self._idle: list[tuple[Connection, float]] = []

    async def take(self) -> Connection:
        """Raises OSError."""
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.reusable and self._clock() - since_s < MAX_IDLE_S:
                return connection
            connection.abort()
        return await self._open(lambda: Connection(self._clock))

    def give_back(self, connection: Connection) -> None:
        """Closes a connection whose answer is incomplete, so that the server stops generating."""
        if connection.reusable and not connection.busy:
            self._idle.append((connection, self._clock()))
        else:
            connection.abort()

    def close(self) -> None:
        for connection, _ in self._idle:
            connection.abort()
        self._idle.clear()
