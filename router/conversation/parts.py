"""Parts of messages that have dozens of kinds: read one by one, so that an error names the part and kinds that have no
meaning here are skipped and listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from protos.errors import InvalidRequest
from router.http.body import shown

IGNORED = "x-baton-ignored"
MAX_IGNORED = 32  # names in the header

_NAME = re.compile(r"[\w.:\[\] -]{1,80}", re.ASCII)

Part = Mapping[str, Any]


class Ignored:
    """Parameters that change nothing here: their names go into the header `x-baton-ignored`. Names beyond
    MAX_IGNORED, and those that a header cannot hold, are counted there."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._num_more = 0

    def add(self, name: str) -> None:
        if name in self._names:
            return
        if len(self._names) < MAX_IGNORED and _NAME.fullmatch(name):
            self._names[name] = None
        else:
            self._num_more += 1

    def headers(self) -> dict[str, str]:
        more = [f"and {self._num_more} more"] if self._num_more else []
        return {IGNORED: ", ".join([*self._names, *more])} if self._names or more else {}

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value.encode()) for name, value in self.headers().items()]


def text_in(part: Part, name: str, where: str) -> str:
    """Raises InvalidRequest, as the functions below do."""
    value = _given(part, name, where)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", value, "a string")
    return value


def object_in(part: Part, name: str, where: str) -> dict[str, Any]:
    value = _given(part, name, where)
    if not isinstance(value, dict):
        raise wrong(f"{where}.{name}", value, "an object")
    return value


def parts_in(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a list, with its place."""
    if not isinstance(value, list):
        raise wrong(where, value, "a list of objects")
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise wrong(f"{where}[{index}]", part, "an object")
        yield f"{where}[{index}]", part


def _given(part: Part, name: str, where: str) -> Any:
    if part.get(name) is None:
        raise InvalidRequest(f"Missing required parameter: '{where}.{name}'.", param=f"{where}.{name}")
    return part[name]


def text_part(text: str) -> dict[str, Any]:
    """A text in the form of chat templates."""
    return {"type": "text", "text": text}


def wrong(where: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"'{where}' is {shown(value)}: it must be {expected}", param=where)
