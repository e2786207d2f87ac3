"""Calls as Python writes them: `[f(city="Paris"), g()]`, of Llama 4 and Llama 3.2. Each is sent when it is complete."""

from __future__ import annotations

import ast
import re

import orjson

from router.tools.calls import CallDelta, HeldText, Part, say

_TAGS = ("<|python_start|>", "<|python_tag|>")
_BEGIN = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
_UNDECIDED = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*)?)?")
_OPEN, _CLOSED = "([{", ")]}"
_END = "<|python_end|>"


class PythonicCalls(HeldText):
    """An answer that is a list of calls; any other is text."""

    def __init__(self) -> None:
        super().__init__()
        self._is_text = False
        self._is_open = False
        self._dropped = ""  # before the call that is being read: it is text, too, if that is none

    def end(self) -> list[Part]:
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._is_open and (held.strip() or not self.num_calls):
            held = self._dropped + held
        is_behind = self.num_calls and not (self._is_open or self._is_text)
        if not self.num_calls or (held.strip() and not is_behind):
            say(parts, held)
        return parts

    def _take(self, parts: list[Part]) -> bool:
        if self._is_text:
            say(parts, self._held)
            self._held = ""
            return False
        return self._take_call(parts) if self._is_open else self._begin()

    def _begin(self) -> bool:
        rest = self._held.lstrip()
        if self.num_calls:
            self._held = rest.replace(_END, "")
            return False
        if any(len(rest) < len(tag) and tag.startswith(rest) for tag in _TAGS):
            return False
        for tag in _TAGS:
            rest = rest.removeprefix(tag)
        if _BEGIN.match(rest):
            self._drop_to(rest.lstrip()[1:])
            self._is_open = True
            return True
        self._is_text = _UNDECIDED.fullmatch(rest) is None
        return self._is_text

    def _take_call(self, parts: list[Part]) -> bool:
        if self.num_calls:
            rest = self._held.lstrip()
            self._drop_to(rest if "," in self._dropped else rest.removeprefix(",").lstrip())
        if self.num_calls and self._held.startswith("]"):
            self._is_open, self._held = False, self._held[1:]
            return True
        size = _length(self._held)
        if size is None:
            return False
        call, self._held = self._held[:size], self._held[size:]
        found = _read(call.strip())
        if found is None:
            self._is_text, self._is_open, self._held = True, False, self._dropped + call + self._held
            return True
        self._dropped = ""
        parts += [
            CallDelta(index=self.num_calls, name=found[0]),
            CallDelta(index=self.num_calls, arguments=found[1]),
        ]
        self.num_calls += 1
        return True

    def _drop_to(self, rest: str) -> None:
        self._dropped += self._held[: len(self._held) - len(rest)]
        self._held = rest


def _length(text: str) -> int | None:
    """Characters up to the parenthesis that closes the call; None: it is still to come."""
    depth, quote, escaped = 0, "", False
    for at, char in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSED:
            depth -= 1
            if depth <= 0:
                return at + 1
    return None


def _read(call: str) -> tuple[str, str] | None:
    """Name and arguments; None: it is no call with literals by name."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        arguments = {one.arg: _literal(one.value) for one in tree.keywords if one.arg is not None}
        return ast.unparse(tree.func), orjson.dumps(arguments).decode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> object:
    """JSON's names are literals, too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    return ast.literal_eval(node)
