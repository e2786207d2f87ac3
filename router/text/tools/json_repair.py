"""Nearly right JSON, as models write it, made right while it comes: strings with raw control characters or unknown
escapes, quotes inside strings, strings and words of Python, words without quotes, commas that are missing or too many,
and brackets. What is right stays as it is, to the character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

_CLOSING = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_DELIMITERS = "{}[],:\"'"
_PLAIN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in "\"'"}
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_UNDECIDED = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_FOLLOWING = re.compile(r"\s{64}|\s*(\S)")  # more white space is not looked through
_KEY, _COLON, _VALUE = "key", "colon", "value"
_MISSING = {_KEY: ": null", _COLON: "null"}  # where an entry of an object ends


class JsonRepair:
    """Reads one value. `is_done`: it is complete. Outside of strings one of the `ends` ends it, too, and so does `end`.
    `is_certain`: no word without quotes was read, and nothing was missing. Inside brackets a quote ends its string if a
    comma, a colon, a bracket or another string follows, and is unread until something does."""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        self._ends = tuple(ends)
        self._end_firsts = {end[0] for end in ends}
        self._open: list[str] = []  # brackets that will close
        self._quote = ""
        self._escape = ""
        self._word: list[str] = []
        self._gap: list[str] = []  # a comma with the white space after it
        self._last = ""  # the last token: one of the above, "," or an opening bracket
        self._json: list[str] = []
        self.is_done = False
        self.is_certain = True

    def feed(self, text: str) -> tuple[str, int]:
        at = 0
        while at < len(text) and not self.is_done:
            char = text[at]
            if self._quote:
                plain = None if self._escape else _PLAIN[self._quote].match(text, at)
                if plain is not None:
                    self._json.append(plain[0])
                    at = plain.end()
                elif char != self._quote or self._escape or not self._open:
                    at += self._in_string(char)
                elif (following := _FOLLOWING.match(text, at + 1)) is None:
                    break
                else:
                    at += self._at_quote(char, following[1] or ",")
                continue
            if char in self._end_firsts:
                if text.startswith(self._ends, at):
                    self._complete()
                    break
                if any(end.startswith(text[at:]) for end in self._ends):
                    break
            at += self._outside(char)
        return self._taken(), at

    def end(self) -> str:
        if not self.is_done:
            self._complete()
        return self._taken()

    def _taken(self) -> str:
        taken = "".join(self._json)
        self._json.clear()
        return taken

    def _in_string(self, char: str) -> bool:
        """False: the character is still to be read."""
        if self._escape:
            escape = self._escape + char
            if _UNDECIDED.fullmatch(escape):
                self._escape = escape
                return True
            is_known = escape == "\\'" or _ESCAPE.fullmatch(escape) is not None
            # A lone backslash, as in a path, is one of the string's characters.
            self._json.append(escape.removeprefix("\\" if char == "'" else "") if is_known else "\\" + self._escape)
            self._escape = ""
            return is_known
        if char == "\\":
            self._escape = char
        elif char == self._quote:
            self._json.append('"')
            self._end_scalar()
        else:
            self._json.append(orjson.dumps(char)[1:-1].decode())
        return True

    def _at_quote(self, quote: str, following: str) -> bool:
        if following in (",", "}", "]", quote, *self._end_firsts) or (following == ":" and self._is_key):
            return self._in_string(quote)
        self._json.append('\\"' if quote == '"' else quote)
        self.is_certain = False
        return True

    @property
    def _is_key(self) -> bool:
        return self._last in ("{", ",") and self._open[-1] == "}"

    def _end_scalar(self) -> None:
        self._quote = ""
        self._last = _KEY if self._is_key else _VALUE
        self.is_done = not self._open

    def _outside(self, char: str) -> bool:
        """False: the character is still to be read."""
        if self._word:
            if char not in _DELIMITERS or (char == ":" and self._last == _COLON):
                self._word.append(char)
            else:
                self._end_word()
                return not self.is_done and self._outside(char)
        elif char.isspace():
            self._space(char)
        elif char in "}]" or (char in ",:" and not self._open):
            return self._end_bracket(char)
        elif char == "," and self._last in _CLOSING:
            self.is_certain = False
        elif char == ",":
            self._json.append(_MISSING.get(self._last, ""))
            self._gap, self._last = [char], char
        elif char == ":" and self._last != _KEY:
            self.is_certain = False
        elif char == ":":
            self._json.append(char)
            self._last = _COLON
        else:
            self._begin(char)
        return True

    def _begin(self, char: str) -> None:
        if char in _CLOSING and self._last == "{":  # once too often
            self.is_certain = False
            return
        if self._last == _KEY:
            self._json.append(":")
            self._last, self.is_certain = _COLON, False
        self._separate()
        if char in _CLOSING and self._is_key:
            self.is_certain = False
            if self._open[-2:-1] == ["]"]:  # the end of the object before is missing
                self._close()
                self._separate()
            else:
                self._json.append(',"":')
                self._gap, self._last = [], _COLON
        self._json += self._gap
        self._gap.clear()
        if char in _CLOSING:
            self._json.append(char)
            self._open.append(_CLOSING[char])
            self._last = char
        elif char in "\"'":
            self._json.append('"')
            self._quote = char
        else:
            self._word.append(char)

    def _separate(self) -> None:
        if self._last == _VALUE:
            self._gap, self._last, self.is_certain = [","], ",", False

    def _space(self, char: str) -> None:
        if self._gap:
            self._gap.append(char)
        elif self._open:
            self._json.append(char)
        elif self._last:
            self.is_done = True

    def _end_word(self) -> None:
        written = "".join(self._word)
        self._word.clear()
        word = written.rstrip()
        right = None if self._is_key else word if _NUMBER.fullmatch(word) else _WORDS.get(word)
        self.is_certain = self.is_certain and right is not None
        self._json.append((right or orjson.dumps(word).decode()) + (written[len(word) :] if self._open else ""))
        self._end_scalar()

    def _end_bracket(self, char: str) -> bool:
        if not self._open:
            self.is_done = True
            return False
        self.is_certain = self.is_certain and char == self._open[-1]
        while char in self._open and self._close() != char:
            pass
        return True

    def _close(self) -> str:
        self._json += [*self._gap[1:], _MISSING.get(self._last, "")]
        self._gap.clear()
        closed = self._open.pop()
        self._json.append(closed)
        self._last, self.is_done = _VALUE, not self._open
        return closed

    def _complete(self) -> None:
        self.is_certain = self.is_certain and not (self._quote or self._open)
        if self._quote:
            self._json += ["\\" + self._escape if self._escape else "", '"']
            self._end_scalar()
        elif self._word:
            self._end_word()
        while self._open:
            self._close()
        self.is_done = True


class CallArguments:
    """Reads a call's arguments: an object is sent as it arrives, any other value at the end. A string with an object is
    that object, null an empty one."""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        self._repair = JsonRepair(ends)
        self._is_object = False
        self._other: list[str] = []

    @property
    def is_done(self) -> bool:
        return self._repair.is_done

    def feed(self, text: str) -> tuple[str, int]:
        json, count = self._repair.feed(text)
        return self._sent(json), count

    def end(self, *, is_whole: bool = True) -> str:
        """The rest of the arguments. A call that was cut off stays incomplete."""
        json = self._sent(self._repair.end()) if is_whole else ""
        if self._is_object:
            return json
        written = "".join(self._other)
        return _object(written) if is_whole else written or "{}"

    def _sent(self, json: str) -> str:
        self._is_object = self._is_object or (not self._other and json.startswith("{"))
        if self._is_object or not json:
            return json
        self._other.append(json)
        return ""


def _object(written: str) -> str:
    try:
        json, value = written, orjson.loads(written or "null")
        if isinstance(value, str):
            json, value = (repaired(value) if value.strip() else None) or (written, value or None)
    except orjson.JSONDecodeError:
        return written
    return "{}" if value in (None, []) else json if isinstance(value, dict) else written


def repaired(text: str, *, is_certain: bool = False) -> tuple[str, Any] | None:
    """The JSON of a text, and its value; None for a text that is not nearly JSON, or continues after it. `is_certain`:
    as in `JsonRepair`."""
    repair = JsonRepair()
    json, count = repair.feed(text)
    json += repair.end()
    if text[count:].strip(" \t\r\n\"'") or (is_certain and not repair.is_certain):
        return None
    try:
        return json, orjson.loads(json)
    except orjson.JSONDecodeError:
        return None
