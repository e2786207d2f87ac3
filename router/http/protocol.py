"""Limits on what a client sends: time and size of each part, and refusals of data that is not an HTTP request.

    opened ──▶ head ──▶ body (`router.http.middleware.BodyLimit`) ──▶ answer ──▶ idle (uvicorn) ──▶ the next head
      └─ HEAD_S ─┘                                            └─ LINGER_S for the rest of a body that was refused

    not a request ──▶ answers to earlier requests ──▶ refusal, end of our side ──▶ LINGER_S: the rest is dropped

The application does not see data that is not a request, so the refusal is written here, in the form of the API's
errors. Afterwards the socket stays open for reading: closing a socket with unread bytes resets it, and the client loses
the refusal.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from protos.errors import BatonError, HeadersTooLarge, InvalidRequest, RequestTimeout, Unavailable, UriTooLong
from router.http.access_log import MAX_PATH, is_logged, log_access
from router.http.errors import error_response
from router.http.response_channel import EXTENSION, CorkedTransport, ResponseChannel, WriteState
from router.log_throttle import RareLog

log = logging.getLogger("baton.http")

HEAD_S = 30.0
LINGER_S = 30.0
CROWDED_LINGER_S = 1.0
SPARE_FILES = 64
"""File descriptors that connections leave to workers' channels, databases and files."""
MAX_UNENDED_HEAD_BYTES = 512 * 1024
"""More bytes than the largest head plus one read: `middleware.HeadLimit` counts heads that are complete exactly."""
MAX_URI_BYTES = 16 * 1024
MAX_FRAMING_BYTES = 64 * 1024
"""Bytes of chunk extensions and trailers: as many as of headers, plus `CHUNK_BYTES` for each chunk. The unused part of
a chunk's share is lost at the end of the read. The read with the end of the head is not counted: asyncio reads at most
256 KiB at a time."""
CHUNK_BYTES = 24
"""The size of a chunk and the ends of its lines: 5 to 22 bytes."""

_VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]{0,5})?", re.ASCII)


class HttpProtocol(HttpToolsProtocol):
    """For uvicorn's `http` setting: its protocol with time limits on everything that a client sends, a refusal of data
    that is not a request, and a `ResponseChannel` in the scope of each request. `crowded` logs connections that are
    refused because the process has hardly any file descriptors left."""

    def __init__(self, *args: Any, crowded: RareLog | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._crowded = crowded or RareLog(log)
        self._num_head_bytes = 0
        self._num_framing_bytes = 0  # extra bytes of the current body, less those that its chunks allow
        self._in_head = True
        self._head_ended = False  # in the read that is being parsed
        self._unanswered: deque[RequestResponseCycle] = deque()  # the first is being answered
        self._has_upgrade = False  # in the last head
        self._fault: BatonError | None = None  # found by a callback of the parser
        self._refusal: BatonError | None = None  # nothing more is parsed; written once its turn has come
        self._lingers = False  # our side of the connection has ended
        self._patience: asyncio.TimerHandle | None = None
        self._channels: list[ResponseChannel] = []  # of pipelined requests: uvicorn notifies only the last one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._corked: Any = CorkedTransport(transport, self.loop, self._close)
        self._wait_for_head()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and transport.get_extra_info("socket").fileno() >= limit - SPARE_FILES:
            self._crowded.note(
                f"connections are refused: this process may have {limit} files open, and nearly has: raise the limit "
                "(ulimit -n, LimitNOFILE)"
            )
            self._refuse(Unavailable("This gateway has too many connections: try again later", retry_after_s=1.0))
            self.loop.call_later(CROWDED_LINGER_S, transport.abort)

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
        if self._lingers:
            self.transport.close()
        super().shutdown()

    # -- what arrives --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._corked.flush()  # must precede the next answer on this connection
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._refusal is not None:
            return
        if self._patience is None and not (self._in_head or self._is_answering):
            # Ends of lines, which begin no head: but for uvicorn's parser they are no silence any more.
            self._in_head, self._num_head_bytes = True, 0
            self._wait_for_head()
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_UNENDED_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"The headers have no end after {self._num_head_bytes} bytes"))
            return
        if self._head_ended:
            self._head_ended, self._num_framing_bytes = False, 0
            return
        self._num_framing_bytes = max(0, self._num_framing_bytes + len(data))
        if self._num_framing_bytes > MAX_FRAMING_BYTES:
            problem = (
                f"The body has more than {MAX_FRAMING_BYTES} bytes of chunk extensions and trailers: leave them out"
            )
            self._refuse(InvalidRequest(problem))

    def _parse(self, data: bytes) -> None:
        while data and self._refusal is None:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserCallbackError:  # `_check_head` has found no valid URL
                self._refuse(self._fault or InvalidRequest("The request's target is not a path that can be read"))
            except httptools.HttpParserError as error:
                self._refuse(InvalidRequest(f"This is not an HTTP request that can be read: {error}"))

    def _without_upgrade(self) -> bytes:
        """The last head, for a new parser: this one treats what follows as another protocol's. No other protocol is
        offered, so the request is served as if it had not requested an upgrade (RFC 9110, 7.8)."""
        self._has_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn's
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"http2-settings")]
        lines = [b"%b: %b\r\n" % (name, _others(value) if name == b"connection" else value) for name, value in kept]
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self.scope["method"].encode(), self.url, b"".join(lines))

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._in_head = True
            self._num_head_bytes = 0
            self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URI_BYTES:
            self._fail(UriTooLong(f"The path and query have more than {MAX_URI_BYTES} bytes: shorten them"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are dropped: they were not there when the request was judged
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._check_head()
            self.scope["method"] = self.parser.get_method().decode()
            self._has_upgrade = True
            return
        self._check_head()
        self._in_head, self._head_ended = False, True
        self._end_wait()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            if before is None or before.response_complete:
                self._channels.clear()
            self._unanswered.append(self.cycle)
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _Unchunked
            self.cycle.transport = self._corked
            channel = ResponseChannel(self.cycle, self._corked)
            self._channels.append(channel)
            extensions: dict[str, Any] = self.cycle.scope.setdefault("extensions", {})
            extensions[EXTENSION] = channel

    def on_body(self, body: bytes) -> None:
        self._num_framing_bytes -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._num_framing_bytes -= CHUNK_BYTES

    def on_message_complete(self) -> None:
        if not self._has_upgrade:
            super().on_message_complete()

    def _check_head(self) -> None:
        """Raises for a head that a proxy may have parsed differently, or that this server must not serve."""
        version, hosts, codings = self.parser.get_http_version(), [], []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
        if version not in _VERSIONS:
            self._fail(InvalidRequest(f"HTTP/{version} is not spoken here: use HTTP/1.1"))
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._fail(InvalidRequest(f"The request has {len(hosts)} Host headers: it must have exactly one"))
        if hosts and not _HOST.fullmatch(hosts[0]):
            self._fail(InvalidRequest(f"The Host header is {_shown(hosts[0])}: it must be a host and, if any, a port"))
        if codings and (version == "1.0" or len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            shown = _shown(b", ".join(codings))
            self._fail(
                InvalidRequest(f"The Transfer-Encoding is {shown}: only 'chunked' is read, and only in HTTP/1.1")
            )
        if self.parser.get_method() == b"CONNECT":
            self._fail(InvalidRequest("CONNECT is for proxies: send the request itself"))

    def _fail(self, fault: BatonError) -> None:
        """Raises the fault; the parser wraps what its callbacks raise."""
        self._fault = fault
        raise fault

    # -- answers -------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        for channel in self._channels:
            channel.leave()
        cycle = self.cycle
        self._unanswered.popleft()
        super().on_response_complete()
        if self._refusal is not None:
            if not (self._is_answering or self._lingers):
                self._write_refusal(self._refusal)
        elif cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            # It was refused before its end had come: the rest is read and dropped.
            self._end_wait()
            self._patience = self.loop.call_later(LINGER_S, self.transport.close)

    def _close(self) -> None:
        """After an answer that is the connection's last one."""
        if self._unanswered and self._unanswered[0].more_body:
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """Ends our side of the connection; data that the client still sends is dropped, for a while."""
        if self._lingers or self.transport.is_closing():
            return
        self._lingers = True
        self._unset_keepalive_if_required()
        self._end_wait()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._patience = self.loop.call_later(LINGER_S, self.transport.close)

    # ------------------------------------------------------------------------------------------------------------------

    def _wait_for_head(self) -> None:
        self._end_wait()
        self._patience = self.loop.call_later(HEAD_S, self._late)

    def _end_wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _late(self) -> None:
        if self._is_answering:
            self._wait_for_head()  # the head of the next request, which is not its turn yet
        elif self._num_head_bytes:
            self._refuse(RequestTimeout(f"The headers had no end within {HEAD_S:g} s"))
        else:  # it has sent nothing
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return bool(self._unanswered)

    def _refuse(self, error: BatonError) -> None:
        """The connection ends with it, after the answers to the requests before it."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._end_wait()
        if not self._in_head and self.cycle is not None and self.cycle.more_body:
            if self.cycle.response_complete:  # it has been refused already, and this was the rest of its body
                self.linger()
                return
            if not self.cycle.response_started:
                self._withdraw(self.cycle)
        if not self._is_answering:
            self._write_refusal(error)

    def _withdraw(self, cycle: RequestResponseCycle) -> None:
        """The last request, whose body cannot be read: its application sees a disconnect."""
        self._unanswered.remove(cycle)
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        else:
            cycle.disconnected = True
            cycle.message_event.set()
        for channel in self._channels:
            if channel.is_of(cycle):
                channel.lost()

    def _write_refusal(self, error: BatonError) -> None:
        self._corked.flush()
        if self.transport.is_closing():
            return
        if is_logged():
            self._log(error.http_status)
        response = error_response(error)
        response.headers["connection"] = "close"
        head = [STATUS_LINE[response.status_code], *(b"%b: %b\r\n" % one for one in response.raw_headers)]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.linger()

    def _log(self, status: int) -> None:
        """The part of the request that was read, if any."""
        path = self.url.partition(b"?")[0].decode("ascii", "backslashreplace") if self.headers is not None else ""
        method = self.scope.get("method", "") if self.scope is not None else ""
        client = self.client[0] if self.client else ""
        log_access(method or "-", path[:MAX_PATH] or "-", status, 0.0, client=client, request="", tenant="", track=None)


class _Unchunked(RequestResponseCycle):
    """An answer over HTTP/1.0, which has no chunks: one without a length ends with its connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if not self.response_started:
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = None if self._has_length else False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def _others(connection: bytes) -> bytes:
    """The options of a Connection header without those of an upgrade."""
    options = [option.strip() for option in connection.split(b",")]
    return b", ".join(option for option in options if option.lower() not in (b"upgrade", b"http2-settings"))


def _shown(value: bytes) -> str:
    return repr(value[:60].decode("latin-1"))
