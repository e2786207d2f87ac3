"""Calls that are objects of JSON, in tags, in a list or alone.

A call is sent as soon as its name is known, and its arguments as they arrive, in the model's own text. Text that looks
like a call but is not one stays text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from router.text.stop_strings import overlap
from router.tools.calls import CallDelta, HeldText, Part, say

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>")
_TOOL_CALLS = "[TOOL_CALLS]"
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class _Calls(HeldText):
    """With the call that is being read. `_closing`: the end of a call is still to come."""

    _opening = ""
    """The opening of a call; it is text if no call follows."""

    def __init__(self) -> None:
        super().__init__()
        self._call: _Call | None = None
        self._closing = False

    def end(self) -> list[Part]:
        parts: list[Part] = []
        if self._call is not None and not self._call.begun:
            self._held = self._opening + self._call.raw + self._held
        elif self._call is not None or self._closing:
            self._held = ""
        if self._held.strip() or not self.num_calls:
            say(parts, self._held)
        self._held, self._call = "", None
        return parts


class TaggedCalls(_Calls):
    """Text, and calls between tags. White space before a call and after the last one is dropped."""

    _opening = _OPEN

    def _take(self, parts: list[Part]) -> bool:
        if self._call is not None:
            return self._take_call(self._call, parts)
        if self._closing:
            rest = self._held.lstrip()
            if not rest.startswith(_CLOSE) and _CLOSE.startswith(rest):
                return False
            self._closing, self._held = False, rest.removeprefix(_CLOSE)
            return True
        before, tag, behind = self._held.partition(_OPEN)
        if tag:
            say(parts, before.rstrip())
            self._call, self._held = _Call(self.num_calls), behind
            return True
        kept = _num_open(self._held)
        say(parts, self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _take_call(self, call: _Call, parts: list[Part]) -> bool:
        self._held = call.feed(self._held, parts)
        if call.broken and call.begun:  # the rest cannot be parsed: all of it up to the tag becomes arguments
            inside, tag, behind = self._held.partition(_CLOSE)
            kept = 0 if tag else overlap(inside, _CLOSE)
            call.tell(inside[: len(inside) - kept], parts)
            self._held = behind if tag else inside[len(inside) - kept :]
            self._call = None if tag else call
            self.num_calls += bool(tag)
            return bool(tag)
        if call.broken or (call.done and not call.begun):
            say(parts, _OPEN + call.raw)
            self._call = None
        elif call.done:
            self._call, self._closing = None, True
            self.num_calls += 1
        return self._call is None


class JsonCalls(_Calls):
    """An answer that begins with an object is calls, as long as they name tools; any other is text."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._is_text = False

    def _take(self, parts: list[Part]) -> bool:
        if self._is_text:
            if self.num_calls and not self._held.strip():  # white space after the last call is dropped
                return False
            say(parts, self._held)
            self._held = ""
            return False
        if self._call is None:
            return self._begin()
        call = self._call
        self._held = call.feed(self._held, parts)
        if call.broken or (call.done and not call.begun):
            if call.begun:
                self.num_calls += 1
            else:
                self._held = self._opening + call.raw + self._held
            self._is_text, self._call = True, None
        elif call.done:
            self.num_calls += 1
            self._call = None
        return self._call is None

    def _begin(self) -> bool:
        rest = self._held.lstrip()
        if not self.num_calls:
            if rest and any(len(rest) < len(tag) and tag.startswith(rest) for tag in _PYTHON_TAGS):
                return False
            for tag in _PYTHON_TAGS:
                rest = rest.removeprefix(tag).lstrip()
        else:
            rest = rest.removeprefix(";").lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._held, self._call = rest, _Call(self.num_calls, self._names)
        else:
            self._is_text = True
        return True


class MistralCalls(JsonCalls):
    """An answer that is a list of calls, as long as they name tools; any other is text. The tag before it is a special
    token, which may have been left out."""

    def _begin(self) -> bool:
        rest = self._held.lstrip()
        if self.num_calls:
            rest = rest.removeprefix(",").lstrip()
            self._opening = ""
            if not rest:
                return False
            self._is_text = not rest.startswith("{")
            self._held = rest.removeprefix("]") if self._is_text else rest
        else:
            if len(rest) < len(_TOOL_CALLS) and _TOOL_CALLS.startswith(rest):
                return False
            inside = rest.removeprefix(_TOOL_CALLS).lstrip()
            if inside == "" or inside.rstrip() == "[":
                return False
            inside = inside[1:].lstrip() if inside.startswith("[") else ""
            self._is_text = not inside.startswith("{")
            if not self._is_text:
                self._opening, self._held = self._held[: len(self._held) - len(inside)], inside
        if not self._is_text:
            self._call = _Call(self.num_calls, self._names)
        return True


class ListCalls(_Calls):
    """Text, and behind one of the `tags` a list of calls. White space before the tag, and all behind the list, is
    dropped."""

    def __init__(self, tags: Sequence[str]) -> None:
        super().__init__()
        self._tags = tags
        self._is_over = False

    def _take(self, parts: list[Part]) -> bool:
        if self._is_over:
            self._held = ""
            return False
        if self._call is not None:
            return self._take_object(self._call, parts)
        if self._closing:  # behind an object of the list
            rest = self._held.lstrip()
            self._held = rest
            if not rest:
                return False
            self._is_over, self._closing = not rest.startswith(","), False
            if not self._is_over:
                self._held, self._call = rest[1:], _Call(self.num_calls)
            return True
        return self._begin(parts)

    def _begin(self, parts: list[Part]) -> bool:
        found = [(at, tag) for tag in self._tags if (at := self._held.find(tag)) >= 0]
        if not found:
            kept = max(overlap(self._held, tag) for tag in self._tags)
            before = self._held[: len(self._held) - kept].rstrip()
            say(parts, before)
            self._held = self._held[len(before) :]
            return False
        at, tag = min(found)
        behind = self._held[at + len(tag) :]
        inside = behind.lstrip()
        if inside == "[" or not inside:
            return False
        say(parts, self._held[:at].rstrip() if inside.startswith("[") else self._held[: at + len(tag)])
        if inside.startswith("["):
            self._opening, self._held, self._call = tag + "[", inside[1:], _Call(self.num_calls)
        else:
            self._held = behind
        return True

    def _take_object(self, call: _Call, parts: list[Part]) -> bool:
        self._held = call.feed(self._held, parts)
        if call.done and call.begun:
            self._call, self._closing, self._opening = None, True, ""
            self.num_calls += 1
        elif call.broken or call.done:
            if call.begun:
                self.num_calls += 1
            else:
                say(parts, self._opening + call.raw)
            self._call, self._opening = None, ""
        return self._call is None


class _Call:
    """One call's object, character by character. Its parts at depth 1 are keys and values; deeper, all is a value."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index = index
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._token: list[str] = []  # lists of pieces: adding to one long text again and again is quadratic
        self._name = ""
        self._arguments: list[str] = []  # parsed and not sent
        self._has_arguments = False
        self._raw: list[str] = []
        self.begun = False
        self.done = False
        self.broken = False

    def feed(self, text: str, parts: list[Part]) -> str:
        """Reads to the object's end; returns the rest."""
        taken = 0
        for char in text:
            if self.done or self.broken:
                break
            taken += 1
            self._read(char)
        if not self.begun:
            self._raw.append(text[:taken])
        if self._name and not self.begun and (self._names is None or self._name in self._names):
            self.begun = True
            parts.append(CallDelta(index=self._index, name=self._name))
        if self.begun:
            if self.done and not self._has_arguments:
                self._arguments = ["{}"]
            self.tell("".join(self._arguments), parts)
            self._arguments.clear()
        return text[taken:]

    @property
    def raw(self) -> str:
        """All that was read, up to where it begun."""
        return "".join(self._raw)

    def tell(self, arguments: str, parts: list[Part]) -> None:
        if arguments:
            parts.append(CallDelta(index=self._index, arguments=arguments))

    def _read(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif self._depth == 0:
            self._depth = int(char == "{")
            self.broken = char != "{" and not char.isspace()
        elif self._depth == 1 and char in ":,}]":
            self._divide(char)
        elif self._depth > 1 or not char.isspace():
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self._keep(char)

    def _keep(self, char: str) -> None:
        is_first, is_arguments = not self._token, self._key in _ARGUMENTS
        # Arguments written as a JSON string contain JSON themselves: sent when complete.
        if is_arguments and (char if is_first else self._token[0]) != '"':
            self._arguments.append(char)
            is_arguments = False
        if is_first or is_arguments or self._key in (None, *_NAMES):  # other values are dropped
            self._token.append(char)

    def _divide(self, char: str) -> None:
        """The end of a key, of a value, or of all."""
        if char == ":" and self._key is None:
            self._key = _string("".join(self._token))
            self.broken = self._key is None
        elif char in ",}" and self._key is not None and self._token:
            self._set(self._key)
            self._key = None
        else:
            self.broken = char != "}" or bool(self._token)
        self.done = char == "}" and not self.broken
        self._token.clear()

    def _set(self, key: str) -> None:
        if key in _NAMES:
            self._name = _string("".join(self._token)) or ""
            self.broken = not self._name
        elif key in _ARGUMENTS:
            self._has_arguments = True
            if self._token[0] == '"':
                text = "".join(self._token)
                held = _string(text)
                self._arguments.append(text if held is None else held)


def _string(token: str) -> str | None:
    """The text of a JSON string, or None if it is no valid string. Half of a surrogate pair is not valid."""
    try:
        found = json.loads(token, strict=False)
        if isinstance(found, str):
            found.encode()
            return found
    except ValueError:
        pass
    return None


def _num_open(text: str) -> int:
    """How many characters at the text's end may belong to a call that follows: the tag's, and white space before."""
    begun = overlap(text, _OPEN)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
