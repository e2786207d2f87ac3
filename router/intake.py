"""How long, and how much, a connection may take to say what it wants: uvicorn asks for no end of a head.

    opened ──▶ head ──▶ body (`router.asgi.BodyLimit`) ──▶ answer ──▶ idle (uvicorn) ──▶ the next head
      └─ HEAD_S ─┘                                            └─ LINGER_S for what is left of a body that was refused

What cannot be a request is answered here, in the form of the API's errors, since no application sees it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protos.errors import BatonError, HeadersTooLarge, InvalidRequest, RequestTimeout
from router.openai.errors import error_response

HEAD_S = 30.0
LINGER_S = 30.0
MAX_UNENDED_HEAD_BYTES = 512 * 1024
"""More than the largest head that is read, and what one read may bring beside it: `router.asgi.HeadLimit` counts
exactly what has an end."""


class Intake(HttpToolsProtocol):
    """uvicorn's protocol with an end to everything that a client sends before it is answered."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._num_head_bytes = 0
        self._in_head = True
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._patience is None and not (self._in_head or self._is_answering):
            # Ends of lines, which begin no head: but for uvicorn's parser they are no silence any more.
            self._in_head, self._num_head_bytes = True, 0
            self._wait_for_head()
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_UNENDED_HEAD_BYTES:
                told = f"The headers have no end after {self._num_head_bytes} bytes"
                self._refuse(HeadersTooLarge(told))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._in_head = True
            self._num_head_bytes = 0
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_wait()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        cycle = self.cycle
        super().on_response_complete()
        if cycle.response_complete and cycle.more_body and not self.transport.is_closing():
            # It was refused before its end had come: the rest is read and dropped.
            self._end_wait()
            self._patience = self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(f"This is no HTTP request that can be read: {msg}"))

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
        else:  # it never said anything
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: BatonError) -> None:
        """The connection ends with it. Nothing is said in the middle of another answer."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            response = error_response(error)
            response.headers["connection"] = "close"
            head = [STATUS_LINE[response.status_code], *(b"%b: %b\r\n" % one for one in response.raw_headers)]
            self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.transport.close()
