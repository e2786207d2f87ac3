"""The body of Anthropic's batches, `{"requests": [{...}, {...}]}`, split into requests as it arrives: of 200 MB no more
than one request is in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from protos.errors import InvalidRequest

_BEGIN = re.compile(rb'\s*\{\s*"requests"\s*:\s*\[')
_END = re.compile(rb"\s*\]\s*\}\s*")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')
_SHAPE = 'The body must be an object with one list, {"requests": [...]}'
MAX_BEGIN_BYTES = 1024


class RequestsReader:
    """Feed it the body, then call `end`. It finds where each request ends; whether it is JSON is its reader's to check.
    Raises InvalidRequest."""

    def __init__(self, max_request_bytes: int) -> None:
        self._max_bytes = max_request_bytes
        self._buffer = bytearray()
        self._at = 0  # the buffer is searched up to here
        self._depth = 0
        self._in_string = False
        self._has_begun = False
        self._has_comma = False  # behind the last request
        self.num_requests = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The requests that are complete."""
        self._buffer += data
        if not self._has_begun:
            if (begin := _BEGIN.match(self._buffer)) is None:
                if len(self._buffer) > MAX_BEGIN_BYTES:
                    raise InvalidRequest(_SHAPE, param="requests")
                return
            del self._buffer[: begin.end()]
            self._has_begun = True
        while (request := self._next()) is not None:
            self.num_requests += 1
            yield request
        if len(self._buffer) > self._max_bytes:
            raise InvalidRequest(
                f"requests.{self.num_requests} has more than {self._max_bytes} bytes", param="requests"
            )

    def end(self) -> None:
        """All of the body has been fed."""
        if not self._has_begun or self._depth or not _END.fullmatch(self._buffer):
            raise InvalidRequest(_SHAPE, param="requests")
        if not self.num_requests:
            raise InvalidRequest("'requests' is empty: give a request", param="requests")

    def _begins(self) -> bool:
        """Whether the buffer begins with the next request, after separators."""
        del self._buffer[: len(self._buffer) - len(self._buffer.lstrip())]
        if self.num_requests and not self._has_comma and self._buffer.startswith(b","):
            self._has_comma = True
            del self._buffer[: len(self._buffer) - len(self._buffer[1:].lstrip())]
        if self._buffer.startswith(b"{") and (self._has_comma or not self.num_requests):
            return True
        if self._buffer and (self._has_comma or not self._buffer.startswith(b"]")):
            behind = " behind a comma" if self.num_requests else ""
            raise InvalidRequest(f"requests.{self.num_requests} is no object{behind}", param="requests")
        return False

    def _next(self) -> bytes | None:
        """The next request; None after the last one, or until more of the body has come."""
        if not self._depth:
            if not self._begins():
                return None
            self._at, self._has_comma = 0, False
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._at)) is not None:
            sign, self._at = found[0], found.end()
            if sign == b"\\":
                if self._at == len(self._buffer):
                    self._at -= 1  # what it escapes has not come yet
                    return None
                self._at += 1
            elif sign == b'"':
                self._in_string = not self._in_string
            elif sign in b"{[":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    request = bytes(self._buffer[: self._at])
                    del self._buffer[: self._at]
                    return request
        self._at = len(self._buffer)
        return None
