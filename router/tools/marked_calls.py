"""Calls between marks whose arguments are JSON: a name, a separator, the arguments.

The arguments are sent as they come, up to the mark behind them: only as much of the text's end is held back as may be
the beginning of a mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from protos.value import Value
from router.text.stop_strings import overlap
from router.tools.calls import CallDelta, HeldText, Part, say

_NUMBER = re.compile(r":\d+$")  # Kimi's, behind a function's name


class CallMarks(Value, frozen=True, kw_only=True):
    """`begin` stands before a name and `separator` behind it; one of `ends` stands behind the arguments, the longest
    one first; none: the next call, or the end of the answer. `dropped` stand around all calls. `prefix` of a name, and
    what follows `suffix` in it, are left out."""

    begin: str
    separator: str
    ends: Sequence[str] = ()
    dropped: Sequence[str] = ()
    prefix: str = ""
    suffix: str = ""


class MarkedCalls(HeldText):
    """Text, and calls between marks. White space before a call and after the last one is dropped."""

    def __init__(self, marks: CallMarks) -> None:
        super().__init__()
        self._marks = marks
        self._outside = (marks.begin, *marks.dropped)
        self._behind = tuple(marks.ends) or (marks.begin,)
        self._state = self._text
        self._has_arguments = False

    def _take(self, parts: list[Part]) -> bool:
        return self._state(parts)

    def end(self) -> list[Part]:
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._state == self._arguments:
            self._close(held, parts)
        elif self._state == self._name:
            say(parts, self._marks.begin + held)
        elif held.strip() or not self.num_calls:
            say(parts, held)
        return parts

    def _text(self, parts: list[Part]) -> bool:
        found = [(at, mark) for mark in self._outside if (at := self._held.find(mark)) >= 0]
        if not found:
            kept = self._num_held(self._outside)
            before = self._held[: len(self._held) - kept].rstrip()
            say(parts, before)
            self._held = self._held[len(before) :]
            return False
        at, mark = min(found)
        before = self._held[:at].rstrip()
        say(parts, before)
        self._held = self._held[at + len(mark) :]
        if mark == self._marks.begin:
            self._state = self._name
        return True

    def _name(self, parts: list[Part]) -> bool:
        name, separator, behind = self._held.partition(self._marks.separator)
        if not separator:
            return False
        if self._marks.suffix:
            name = name.partition(self._marks.suffix)[0]
        name = _NUMBER.sub("", name.strip()) if self._marks.prefix else name.strip()
        name = name.removeprefix(self._marks.prefix)
        if not name:  # no call has begun
            say(parts, self._marks.begin + self._held[: len(self._held) - len(behind)])
            self._held, self._state = behind, self._text
            return True
        parts.append(CallDelta(index=self.num_calls, name=name))
        self._held, self._state, self._has_arguments = behind, self._arguments, False
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        found = [(at, -len(mark), mark) for mark in self._behind if (at := self._held.find(mark)) >= 0]
        if not found:
            kept = self._num_held(self._behind)
            self._tell(self._held[: len(self._held) - kept], parts)
            self._held = self._held[len(self._held) - kept :]
            return False
        at, _, mark = min(found)
        written, self._held = self._held[:at], self._held[at + len(mark) :]
        self._close(written, parts)
        self._state = self._text if self._marks.ends else self._name
        return True

    def _close(self, written: str, parts: list[Part]) -> None:
        self._tell(written, parts)
        if not self._has_arguments:
            self._tell("{}", parts)
        self.num_calls += 1

    def _tell(self, arguments: str, parts: list[Part]) -> None:
        if not self._has_arguments:
            arguments = arguments.lstrip()
        if arguments:
            self._has_arguments = True
            parts.append(CallDelta(index=self.num_calls, arguments=arguments))

    def _num_held(self, marks: Sequence[str]) -> int:
        return max(overlap(self._held, mark) for mark in marks)
