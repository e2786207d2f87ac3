"""The lines of a batch's input: checked before any runs, then run in an order that shares prefixes.

An index of 52 bytes a line is kept, never the lines: 50,000 lines of 200 MB need 3 MB.

Lines are sorted by fingerprints of what begins their prompts: of its first 256, 1,024, 4,096 and 16,384 bytes, and of
all. Lines that share a prefix of one of these lengths are neighbours, whatever else they contain.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from protos.errors import BatonError
from router.files.records import LineError

LEVELS = (256, 1024, 4096, 16_384)
MAX_ERRORS = 100
"""Errors of an input file that are kept; its reader mends some and tries again."""
MAX_ID_CHARS = 512
_READ_BYTES = 1 << 18
_INSTRUCTIONS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""Parts of a body in the order in which a prompt begins with them."""


class LineIndex:
    """The place and length of each line, and its number in the order of running."""

    def __init__(self) -> None:
        self.starts = array("Q")
        self.sizes = array("I")
        self._marks: tuple[array[int], ...] = tuple(array("Q") for _ in range(len(LEVELS) + 1))

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, start: int, size: int, body: dict[str, Any]) -> None:
        self.starts.append(start)
        self.sizes.append(size)
        for marks, mark in zip(self._marks, _fingerprints(body), strict=True):
            marks.append(mark)

    def order(self) -> array[int]:
        """Numbers of lines in the order of running: neighbours share prefixes, equal lines keep the file's order."""
        columns = [np.frombuffer(marks, dtype=np.uint64) for marks in reversed(self._marks)]
        return array("I", np.lexsort(columns).astype(np.uint32).tobytes())


def _fingerprints(body: dict[str, Any]) -> Iterator[int]:
    text = b""
    with suppress(TypeError):  # nested too deeply: no prompt will be made of it
        text = b"".join(orjson.dumps(body[name]) for name in _INSTRUCTIONS if body.get(name) is not None)
    seen, last = hashlib.blake2b(digest_size=8), 0
    for stop in (*LEVELS, len(text)):
        seen.update(text[last:stop])
        last = max(last, stop)
        yield int.from_bytes(seen.digest(), "little")


class InputChecker:
    """Checks an input file and indexes it. `check_model` raises BatonError for a model that is not served."""

    def __init__(
        self, endpoint: str, check_model: Callable[[str], None], *, max_lines: int, max_line_bytes: int
    ) -> None:
        self.index = LineIndex()
        self.errors: list[LineError] = []
        self._endpoint = endpoint
        self._check_model = check_model
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._ids: set[bytes] = set()
        self._checked_models: set[str] = set()
        self._number = 0

    def read(self, read: Callable[[int, int], bytes]) -> None:
        """`read` returns bytes of the file from a place on. Call it in a thread. Raises NotFound or Unavailable."""
        buffer, start = bytearray(), 0
        while len(self.errors) < MAX_ERRORS:
            data = read(start + len(buffer), _READ_BYTES)
            buffer += data
            if not data:
                if buffer.strip():
                    self._line(start, bytes(buffer))
                break
            begin = 0
            while (end := buffer.find(b"\n", begin)) >= 0:
                self._line(start + begin, bytes(buffer[begin:end]))
                begin = end + 1
            del buffer[:begin]
            start += begin
            if len(buffer) > self._max_line_bytes:
                self._number += 1
                self._wrong("line_too_large", f"This line has more than {self._max_line_bytes} bytes")
                break
        if not self.index and not self.errors:
            self.errors.append(
                LineError(code="empty_file", message="The input file has no line: give a request a line")
            )
        del self.errors[MAX_ERRORS:]
        self._ids = set()

    def _line(self, start: int, raw: bytes) -> None:
        self._number += 1
        if not raw.strip():
            return
        if len(self.index) >= self._max_lines:
            if len(self.index) == self._max_lines and not any(one.code == "too_many_tasks" for one in self.errors):
                self._wrong("too_many_tasks", f"The input file has more than {self._max_lines} requests: split it")
            return
        if len(self.errors) >= MAX_ERRORS:
            return
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            self._wrong("invalid_json_line", f"This line is not parseable as valid JSON: {error}")
            return
        if not isinstance(found, dict):
            self._wrong("invalid_request", "This line is not a JSON object: give custom_id, method, url and body")
            return
        if self._is_right(found):
            self.index.add(start, len(raw), found["body"])

    def _is_right(self, found: dict[str, Any]) -> bool:
        before = len(self.errors)
        custom_id = found.get("custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
            message = f"'custom_id' must be a string of 1 to {MAX_ID_CHARS} characters"
            self._wrong("missing_required_parameter", message, "custom_id")
        else:
            digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
            if digest in self._ids:
                message = f"The custom_id '{custom_id[:80]}' is another request's: give each its own"
                self._wrong("duplicate_custom_id", message, "custom_id")
            self._ids.add(digest)
        if found.get("method") != "POST":
            self._wrong("invalid_method", "'method' must be POST", "method")
        if found.get("url") != self._endpoint:
            self._wrong("mismatched_url", f"'url' must be {self._endpoint}, the batch's endpoint", "url")
        body = found.get("body")
        if not isinstance(body, dict):
            self._wrong("missing_required_parameter", "'body' must be an object, the request's body", "body")
        else:
            self._check_body(body)
        return len(self.errors) == before

    def _check_body(self, body: dict[str, Any]) -> None:
        model = body.get("model")
        if not isinstance(model, str):
            self._wrong("missing_required_parameter", "'model' must be a string", "body.model")
        elif model not in self._checked_models:
            try:
                self._check_model(model)
            except BatonError as error:
                self._wrong(error.code, error.message, "body.model")
            else:
                self._checked_models.add(model)
        if body.get("stream"):
            self._wrong("invalid_request", "'stream' must be false: a batch has whole answers", "body.stream")

    def _wrong(self, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(LineError(code=code, message=message, line=self._number, param=param))
