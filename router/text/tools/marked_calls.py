"""Calls between marks whose arguments are JSON: a name, a separator, the arguments, which are sent as they come."""

from __future__ import annotations

import re
from collections.abc import Sequence

from protos.codec import Value
from router.text.tools.calls import CallDelta, Part, TextAndCalls, first_of
from router.text.tools.json_repair import CallArguments

_FENCES = ("```json", "```")
_NAME = re.compile(r"[^\s{}\[\]<>\"`]+")
_NUMBER = re.compile(r":\d+$")  # Kimi's, behind a function's name


class CallMarks(Value, frozen=True, kw_only=True):
    """`begin` precedes a name and `separator` follows it; one of `ends` follows the arguments, which otherwise end with
    their object. `outer` and `outer_end` enclose all calls. Of a name, `prefix` and everything from `suffix` on are
    dropped."""

    begin: str
    separator: str
    ends: Sequence[str] = ()
    outer: Sequence[str] = ()
    outer_end: Sequence[str] = ()
    prefix: str = ""
    suffix: str = ""


class MarkedCalls(TextAndCalls):
    def __init__(self, marks: CallMarks) -> None:
        super().__init__((marks.begin,), (*marks.ends, *marks.outer_end), marks.outer)
        self._marks = marks
        self._arguments = CallArguments()

    def _opened(self, mark: str) -> None:
        self._state = self._name

    def _name(self, parts: list[Part]) -> bool:
        """Reads a name up to the separator, or to the arguments or the call's end without one."""
        marks, rest = self._marks, self._held.lstrip()
        if marks.prefix.startswith(rest):
            return False
        self._drop_to(rest.removeprefix(marks.prefix))
        at, mark = first_of(self._held, (marks.separator, "{", *_FENCES, *self._begin, *self._behind))
        if not mark:
            return False
        name = self._held[:at].partition(marks.suffix)[0] if marks.suffix else self._held[:at]
        name = _NUMBER.sub("", name.strip()) if marks.prefix else name.strip()
        self._drop_to(self._held[at + len(mark) if mark == marks.separator else at :])
        if _NAME.fullmatch(name) is None:
            self._end_opening(parts)
            return True
        self._begin_call(name, parts)
        self._state = self._fence
        return True

    def _fence(self, parts: list[Part]) -> bool:
        """Reads text before the arguments, where a Markdown fence may be."""
        self._held = self._held.lstrip()
        if any(len(fence) > len(self._held) and fence.startswith(self._held) for fence in _FENCES):
            return False
        self._held = self._held.removeprefix(_FENCES[0]).removeprefix(_FENCES[1])
        self._state = self._in_arguments
        return True

    def _begin_call(self, name: str, parts: list[Part]) -> None:
        parts.append(CallDelta(index=self.num_calls, name=name))
        self._opening, self._state, self._arguments = "", self._in_arguments, CallArguments()

    def _in_arguments(self, parts: list[Part]) -> bool:
        at, mark = first_of(self._held, (*self._begin, *self._behind))
        arguments, count = self._arguments.feed(self._held[:at])
        self._tell(arguments, parts)
        is_over = self._arguments.is_done and not self._marks.ends
        self._held = self._held[count if is_over or not (mark or self._arguments.is_done) else at :]
        has_ended = bool(mark) or is_over
        if has_ended:
            self._close(parts)
        return has_ended

    def _close(self, parts: list[Part], *, is_whole: bool = True) -> None:
        self._tell(self._arguments.end(is_whole=is_whole), parts)
        self.num_calls += 1
        self._state = self._text

    def _end(self, parts: list[Part], is_whole: bool) -> None:
        if self._state in (self._fence, self._in_arguments):
            arguments, _ = self._arguments.feed(self._held)
            self._tell(arguments, parts)
            self._close(parts, is_whole=is_whole)
            self._held = ""


class NamedCalls(MarkedCalls):
    """Calls that begin with a function's name on its own line, followed by an object."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(CallMarks(begin="", separator=""))
        self._begin = tuple(f"{name}{space}\n{{" for name in names for space in ("", " "))

    def _opened(self, mark: str) -> None:
        self._state = self._named

    def _named(self, parts: list[Part]) -> bool:
        self._held = "{" + self._held
        self._begin_call(self._opening[:-1].strip(), parts)
        return True
