"""A body of multipart/form-data, part by part as it arrives (RFC 7578): no part is kept.

--BOUNDARY CRLF headers CRLF CRLF content CRLF --BOUNDARY ... --BOUNDARY--
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from protos.errors import InvalidRequest

MAX_HEAD_BYTES = 8192
MAX_PARTS = 64
_BOUNDARY = re.compile(r"multipart/form-data\s*;.*?boundary=(?:\"([^\"]{1,70})\"|([^\s;,\"]{1,70}))", re.I | re.S)
_NAME = re.compile(rb";\s*name=(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;]+))")
_FILENAME = re.compile(rb";\s*filename=(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;]+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPart:
    """The beginning of a part. `filename` is None for a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContent:
    """More of the content of the part that began last."""

    data: bytes


def boundary_of(content_type: str) -> bytes:
    """Raises InvalidRequest."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise InvalidRequest(
            f"The body comes with 'Content-Type: {content_type[:80]}': send a file as multipart/form-data, "
            "as `curl -F purpose=batch -F file=@requests.jsonl` does"
        )
    return (found[1] or found[2]).encode()


class MultipartReader:
    """`feed` it the body; `ended` when the last boundary has come. Keeps less than a part's head."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first boundary has no line before it
        self._in_head = False
        self._has_begun = False
        self._num_parts = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[FormPart | PartContent]:
        """Raises InvalidRequest."""
        self._buffer += data
        while not self.ended:
            if self._in_head:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    if len(self._buffer) > MAX_HEAD_BYTES:
                        raise InvalidRequest(f"A part of the form has headers of more than {MAX_HEAD_BYTES} bytes")
                    return
                head = bytes(self._buffer[:end])
                del self._buffer[: end + 4]
                self._in_head = False
                yield self._part(head)
                continue
            at = self._buffer.find(self._delimiter)
            if at < 0:
                kept = len(self._delimiter) + 2
                if len(self._buffer) > kept:
                    yield from self._content(len(self._buffer) - kept)
                return
            after = at + len(self._delimiter)
            if len(self._buffer) < after + 2:
                yield from self._content(at)
                return
            yield from self._content(at)
            mark = bytes(self._buffer[len(self._delimiter) : len(self._delimiter) + 2])
            del self._buffer[: len(self._delimiter) + 2]
            if mark == b"--":
                self.ended = True
            elif mark == b"\r\n":
                self._in_head = self._has_begun = True
            else:
                raise InvalidRequest("The form's body has something behind a boundary: end its line there")

    def _content(self, stop: int) -> Iterator[PartContent]:
        data = bytes(self._buffer[:stop])
        del self._buffer[:stop]
        if data and self._has_begun:
            yield PartContent(data=data)

    def _part(self, head: bytes) -> FormPart:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts")
        for line in head.split(b"\r\n"):
            if line[:20].lower() == b"content-disposition:":
                name, filename = _NAME.search(line), _FILENAME.search(line)
                if name is not None:
                    return FormPart(name=_text(name), filename=None if filename is None else _text(filename))
        raise InvalidRequest("A part of the form has no name: give it 'Content-Disposition: form-data; name=...'")


def _text(found: re.Match[bytes]) -> str:
    quoted = found[1]
    text: bytes = found[2] if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
    return text.decode("utf-8", "replace")
