"""Calls as Python writes them: `[f(city="Paris"), g()]`, or a line each. A call is sent when it is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import orjson

from protos.codec import Value
from router.text.tools.calls import CallDelta, Part, TextAndCalls, may_begin

_CALL = re.compile(r"[A-Za-z_][\w.-]*\(")
_UNDECIDED = re.compile(r"([A-Za-z_][\w.-]*)?")
_STRING = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
_OPEN, _CLOSED = "([{", ")]}"


class PythonMarks(Value, frozen=True, kw_only=True):
    """The marks around calls. With `bare` a list of calls may be an answer's beginning, too."""

    begin: Sequence[str]
    end: Sequence[str]
    bare: bool = False


class PythonicCalls(TextAndCalls):
    def __init__(self, marks: PythonMarks) -> None:
        super().__init__(marks.begin, marks.end)
        self._brackets = _Brackets()
        if marks.bare:
            self._state = self._start

    def _start(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        self._state = self._inside if rest.startswith("[") else self._text
        return bool(rest)

    def _opened(self, mark: str) -> None:
        self._state = self._inside

    def _inside(self, parts: list[Part]) -> bool:
        self._drop_to(self._held.lstrip())
        if self._held.startswith("["):
            self._drop_to(self._held[1:])
            return True
        if _CALL.match(self._held):
            self._state, self._brackets = self._in_call, _Brackets()
        elif _UNDECIDED.fullmatch(self._held):
            return False
        else:
            self._end_opening(parts)
        return True

    def _in_call(self, parts: list[Part]) -> bool:
        size = self._brackets.closing(self._held)
        if size is None:
            return False
        call = self._held[:size]
        read = _read(call)
        self._drop_to(self._held[size:])
        if read is None:
            self._end_opening(parts)
            return True
        parts.append(CallDelta(index=self.num_calls, name=read[0]))
        self._tell(read[1], parts)
        self.num_calls += 1
        self._opening, self._state = "", self._between
        return True

    def _between(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        following = rest.removeprefix(",").lstrip()
        if not following or may_begin(following, self._behind) == len(following):
            return False
        if following[0] == "]":
            self._held, self._state = following[1:], self._text
        elif _CALL.match(following):
            self._held, self._state, self._brackets = following, self._in_call, _Brackets()
        elif _UNDECIDED.fullmatch(following):
            return False
        else:
            self._state = self._text
        return True

    def _end(self, parts: list[Part], is_whole: bool) -> None:
        if self._state == self._between:
            self._held = self._held.strip(", \t\r\n")


class _Brackets:
    """Looks for the parenthesis that closes a call, at each character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._escaped = False

    def closing(self, text: str) -> int | None:
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in _OPEN:
                self._depth += 1
            elif char in _CLOSED:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None


def _read(call: str) -> tuple[str, str] | None:
    """Name and arguments; None: it is no call with literals by name."""
    name, _, behind = call.partition("(")
    behind = _STRING.sub(lambda string: string[0].replace("\n", "\\n"), behind)  # a string may have several lines
    try:
        tree = ast.parse(f"f({behind}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        arguments = {
            keyword.arg: ast.literal_eval(_Words().visit(keyword.value))
            for keyword in tree.keywords
            if keyword.arg is not None
        }
        return name, orjson.dumps(arguments).decode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node
