"""Parts of a conversation that have dozens of kinds: those without a meaning here are skipped and listed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from protos.errors import InvalidRequest, UnsupportedParameter
from router.http.body import OpenBody, OtherPart, shown

IGNORED = "x-baton-ignored"
MAX_IGNORED = 32  # names in the header

_NAME = re.compile(r"[\w.:\[\] -]{1,80}", re.ASCII)

_Part = TypeVar("_Part")


class Ignored:
    """Names of parameters that change nothing here, for the header `x-baton-ignored`. Names beyond MAX_IGNORED are
    counted."""

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

    def add_unlisted(self, body: OpenBody | None, prefix: str = "") -> None:
        for name in (body.model_extra or {}) if body is not None else ():
            self.add(f"{prefix}{name}")


def placed(parts: Iterable[_Part], where: str) -> Iterator[tuple[str, _Part]]:
    """Each part with its place in the request."""
    for index, part in enumerate(parts):
        yield f"{where}[{index}]", part


def listed_tools(tools: Sequence[_Part | OtherPart] | None, ignored: Ignored) -> list[_Part]:
    """The tools of the kinds that a body lists. Others are skipped and noted. Raises InvalidRequest for a tool without
    a kind."""
    listed: list[_Part] = []
    for where, tool in placed(tools or (), "tools"):
        if not isinstance(tool, OtherPart):
            listed.append(tool)
        elif isinstance(tool.type, str):
            ignored.add(f"{where}: {tool.type}")
        else:
            raise wrong(f"{where}.type", tool.type, "a string")
    return listed


def not_text(where: str, kind: Any) -> UnsupportedParameter:
    problem = f"'{where}' has the type {kind}: this model reads text only; leave it out, or give its text"
    return UnsupportedParameter(problem, param=where)


def missing(where: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: '{where}'.", param=where)


def text_part(text: str) -> dict[str, Any]:
    """A text in the form of chat templates."""
    return {"type": "text", "text": text}


def wrong(where: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"'{where}' is {shown(value)}: it must be {expected}", param=where)
