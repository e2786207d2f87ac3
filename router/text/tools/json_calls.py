"""Calls that are objects of JSON, in tags, in a list or alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from protos.codec import Value
from router.text.tools.calls import CallDelta, Part, TextAndCalls, may_begin
from router.text.tools.json_repair import CallArguments, JsonRepair

_NAMES = ("name", "tool_name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


class ObjectMarks(Value, frozen=True, kw_only=True):
    """`begin` marks precede a call or a list of calls, `end` marks may follow it. `bare`: how an answer begins that is
    calls without a mark; "": never."""

    begin: Sequence[str]
    end: Sequence[str] = ()
    bare: str = ""


class ObjectCalls(TextAndCalls):
    """Behind a mark any object with a name is a call; without one it must name a function."""

    def __init__(self, marks: ObjectMarks, names: Collection[str]) -> None:
        super().__init__(marks.begin, marks.end)
        self._bare = marks.bare
        self._names: Collection[str] | None = names
        self._call = _Call()
        if marks.bare:
            self._state = self._start

    def _start(self, parts: list[Part]) -> bool:
        begun = "".join(self._held.split())[: len(self._bare)]
        if begun != self._bare and self._bare.startswith(begun):
            return False
        self._state = self._inside if begun == self._bare else self._text
        return True

    def _opened(self, mark: str) -> None:
        self._names, self._state = None, self._inside

    def _inside(self, parts: list[Part]) -> bool:
        self._drop_to(self._held.lstrip())
        is_fenced = self._names is None and self._opening.rstrip().endswith("`")  # Markdown's, before an object
        if self._held.startswith("[") or (self._names is None and self._held.startswith("`")):
            self._drop_to(self._held[1:])
        elif is_fenced and "json".startswith(self._held[:4]):
            if len(self._held) < 4:
                return False
            self._drop_to(self._held[4:])
        elif self._held.startswith("{"):
            self._begin_call()
        elif self._held:
            self._end_opening(parts)
        return bool(self._held)

    def _begin_call(self) -> None:
        self._call, self._state = _Call(self.num_calls, self._names, self._behind), self._in_call

    def _in_call(self, parts: list[Part]) -> bool:
        call = self._call
        self._held = call.feed(self._held, parts)
        self._opening = "" if call.begun else self._opening
        if not call.is_over:
            return False
        if call.begun:
            self._state = self._between
            self.num_calls += 1
        else:
            self._opening += call.raw
            self._end_opening(parts)
        return True

    def _between(self, parts: list[Part]) -> bool:
        """Reads text after an object. Brackets are dropped."""
        rest = self._held.lstrip()
        following = rest[1:].lstrip() if rest[:1] in (",", ";") else rest
        if not following or may_begin(following, self._behind) == len(following):
            return False
        if following[0] in ("]}`" if self._names is None else "]}"):
            self._held = following[1:]
        elif following[0] == "{":
            self._held = following
            self._begin_call()
        else:
            self._state = self._text
        return True

    def _end(self, parts: list[Part], is_whole: bool) -> None:
        if self._state == self._in_call and self._call.begun:
            self._call.end(parts, is_whole=is_whole)
            self.num_calls += 1
            self._held = ""
        elif self._state == self._in_call:
            self._opening += self._call.raw
        elif self._state == self._between:
            self._held = self._held.strip(",; \t\r\n")


class _Call:
    """Reads the object of a call. With `names` its function must be one of them; any of `ends` ends it."""

    def __init__(self, index: int = 0, names: Collection[str] | None = None, ends: Sequence[str] = ()) -> None:
        self._index = index
        self._names = names
        self._ends = tuple(ends)
        self._expected = "{"  # then "key", ":" and "value"
        self._key = ""
        self._name = ""
        self._reader: JsonRepair | CallArguments | None = None  # of the key or the value that is being read
        self._token: list[str] = []  # characters of the current token
        self._arguments: list[str] = []  # read and not sent
        self._has_arguments = False
        self._raw: list[str] = []
        self.begun = False
        self.is_over = False

    def feed(self, text: str, parts: list[Part]) -> str:
        at = 0
        while not self.is_over:
            if self._reader is not None:
                token, count = self._reader.feed(text[at:])
                at += count
                self._take(token)
                if not self._reader.is_done:
                    break
                self._end_token()
                continue
            at = len(text) - len(text[at:].lstrip())
            if at == len(text) or any(len(end) > len(text) - at and end.startswith(text[at:]) for end in self._ends):
                break
            if self._expected == "key":
                self._begin(parts)
            at += self._read(text[at], text.startswith(self._ends, at))
        if self.begun:
            self._send(parts)
        else:
            self._raw.append(text[:at])
        return text[at:]

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def end(self, parts: list[Part], *, is_whole: bool) -> None:
        if isinstance(self._reader, CallArguments):
            self._take(self._reader.end(is_whole=is_whole))
        self.is_over = True
        self._send(parts)

    def _read(self, char: str, is_end: bool) -> bool:
        """Reads a character between two tokens. False: it is left for the next one, or behind the call."""
        match self._expected, char:
            case _ if is_end:
                self.is_over = True
                return False
            case ("{", _) | ("key", "{") if char == "{" and not self._key:
                self._expected = "key"
            case "key", "}":
                self.is_over = True
            case "key", ",":
                pass
            case ("key", "{" | "[" | "]") | ("{", _):
                self.is_over = True
                return False
            case "key", _:
                self._reader = JsonRepair(self._ends)
                return False
            case ":", ":":
                self._expected = "value"
            case ":", _:
                self.is_over = True
                return False
            case "value", "{" if self._key == "function":  # OpenAI's form, with the call in it
                self._expected, self._key = "key", ""
            case _:
                is_first = self._key in _ARGUMENTS and not self._has_arguments
                self._reader = (CallArguments if is_first else JsonRepair)(self._ends)
                return False
        return True

    def _take(self, token: str) -> None:
        if not token:
            return
        if isinstance(self._reader, CallArguments):
            self._arguments.append(token)
            self._has_arguments = True
        elif self._expected == "key" or self._key in _NAMES:  # other values are dropped
            self._token.append(token)

    def _end_token(self) -> None:
        assert self._reader is not None
        self._take(self._reader.end())
        token, self._reader = "".join(self._token), None
        self._token.clear()
        if self._expected == "key":
            self._key, self._expected = _string(token), ":"
        else:
            self._expected = "key"
            if self._key in _NAMES and not self._name:
                self._name = _string(token)
                self.is_over = not self._name

    def _begin(self, parts: list[Part]) -> None:
        if self._name and not self.begun and (self._names is None or self._name in self._names):
            self.begun = True
            parts.append(CallDelta(index=self._index, name=self._name))

    def _send(self, parts: list[Part]) -> None:
        if self.is_over and not self._has_arguments:
            self._arguments = ["{}"]
        if arguments := "".join(self._arguments):
            parts.append(CallDelta(index=self._index, arguments=arguments))
            self._arguments.clear()


def _string(token: str) -> str:
    try:
        text = json.loads(token)
        if isinstance(text, str):
            text.encode()
            return text
    except ValueError:
        pass
    return ""
