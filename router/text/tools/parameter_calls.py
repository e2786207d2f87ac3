"""Calls whose parameters stand between tags, as text: written as JSON while they come.

qwen3_coder   <function=f>\\n<parameter=city>\\nParis\\n</parameter>\\n</function>
glm           <tool_call>f\\n<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value>\\n</tool_call>
minimax_m2    <invoke name="f">\\n<parameter name="city">Paris</parameter>\\n</invoke>"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import orjson

from protos.codec import Value
from router.text.tools.calls import ANY, CallDelta, Function, ParameterType, Part, TextAndCalls, first_of
from router.text.tools.json_repair import repaired

_NAME = re.compile(r"[\w.:/-]+")
_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,), "integer": (int,), "number": (int, float), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


class ParameterTags(Value, frozen=True, kw_only=True):
    """`begin` and `end` enclose a call; `name_ends` follows its name. `key` and `key_end` enclose a parameter's name,
    `value` and `close` its value, `outer` and `outer_end` all calls. With `is_lined` a value is on lines of its own."""

    begin: str
    end: str
    name_ends: Sequence[str]
    key: str
    key_end: str
    close: str
    value: str = ""
    outer: Sequence[str] = ()
    outer_end: Sequence[str] = ()
    is_lined: bool = False


class ParameterCalls(TextAndCalls):
    """Text, and calls between tags. Outside of the outer tags a call must name a function."""

    def __init__(self, tags: ParameterTags, functions: Sequence[Function]) -> None:
        super().__init__((tags.begin,), (*tags.outer_end, tags.end), tags.outer)
        self._tags = tags
        self._functions = {function.name: function.types() for function in functions}
        self._parameters: Mapping[str, ParameterType] = {}
        self._keys: Sequence[str] = ()  # openings of the parameters
        self._num_parameters = 0
        self._value: list[str] | None = None  # the value of a parameter that is sent when complete
        self._type = ANY
        self._is_fresh = False
        self._is_over = False

    def _opened(self, mark: str) -> None:
        self._state = self._name

    def _name(self, parts: list[Part]) -> bool:
        at, end = first_of(self._held, self._tags.name_ends)
        name = self._held[:at].strip()
        if (name or end) and _NAME.fullmatch(name) is None:
            self._end_opening(parts)
            return True
        if not end:
            return False
        is_next = end in (self._tags.key, self._tags.end)
        self._drop_to(self._held[at if is_next else at + len(end) :])
        if self._outer and not self._is_inside and name not in self._functions:
            self._end_opening(parts)
            return True
        self._parameters, self._num_parameters = self._functions.get(name, {}), 0
        self._keys = [f"{self._tags.key}{key}{self._tags.key_end}" for key in self._parameters]
        parts.append(CallDelta(index=self.num_calls, name=name))
        self._opening, self._state = "", self._between
        return True

    def _between(self, parts: list[Part]) -> bool:
        at, mark = first_of(self._held, (self._tags.key, *self._begin, *self._outer, *self._behind))
        if not mark:
            return False
        if mark != self._tags.key:
            self._held = self._held[at:]
            self._close(parts)
            return True
        name, end, behind = self._held[at + len(mark) :].partition(self._tags.key_end)
        rest = behind.lstrip() if self._tags.value else behind
        if not end or (not rest.startswith(self._tags.value) and self._tags.value.startswith(rest)):
            return False
        self._held, name = rest.removeprefix(self._tags.value), name.strip()
        self._type = self._parameters.get(name, ANY)
        self._value, self._state, self._is_fresh = None if self._type.is_text else [], self._inside_value, True
        head = ("{" if not self._num_parameters else ", ") + orjson.dumps(name).decode() + ": "
        self._tell(head + ('"' if self._type.is_text else ""), parts)
        self._num_parameters += 1
        return True

    def _inside_value(self, parts: list[Part]) -> bool:
        """A value ends with its tag, with the opening of a known parameter, and with the call."""
        close, others = self._tags.close, (*self._keys, *self._behind)
        lined = ("\n" + end for end in ((close, *others) if self._tags.is_lined else others))
        at, mark = first_of(self._held, (close, *others, *lined))
        is_end: bool | None = bool(mark)
        if mark.lstrip() in self._behind:
            is_end = self._is_end(self._held[at + len(mark) :].lstrip())
            at += len(mark) if is_end is False else 0
        self._write(self._held[:at], parts)
        self._held = self._held[at:]
        if is_end:
            self._held = self._held.removeprefix("\n").removeprefix(close)
            self._end_value(parts)
        return bool(mark) and is_end is not None

    def _is_end(self, rest: str) -> bool | None:
        """True if the call ends before the rest, False if the rest is the value's text; None: more text decides."""
        tags = (*self._begin, *self._outer, *self._behind)
        if rest.startswith(tags):
            return True
        return (self._is_over or None) if any(tag.startswith(rest) for tag in tags) else False

    def _write(self, text: str, parts: list[Part]) -> None:
        if self._is_fresh and text:
            self._is_fresh = False
            if self._tags.is_lined:
                text = text.removeprefix("\n")
        if self._value is not None:
            self._value.append(text)
        elif text:
            self._tell(orjson.dumps(text)[1:-1].decode(), parts)

    def _end_value(self, parts: list[Part]) -> None:
        self._tell('"' if self._value is None else _json("".join(self._value), self._type.types), parts)
        self._state = self._between

    def _close(self, parts: list[Part]) -> None:
        self._tell("}" if self._num_parameters else "{}", parts)
        self.num_calls += 1
        self._state = self._text

    def _end(self, parts: list[Part], is_whole: bool) -> None:
        self._is_over = True
        inside = (self._inside_value, self._between)
        while self._held and self._state in inside and self._state(parts):
            pass
        if self._state == self._inside_value:
            self._write(self._held, parts)
            if is_whole:
                self._end_value(parts)
            else:
                self._tell("".join(self._value or ()), parts)
        if self._state == self._between and (is_whole or not self._num_parameters):
            self._close(parts)
            self._held = ""
        elif self._state in inside:
            self.num_calls += 1
            self._held, self._state = "", self._text


def _json(text: str, types: frozenset[str]) -> str:
    """The text itself if it is JSON of one of the types, or nearly; else a JSON string. If a string is allowed, only a
    valid value of another type is not a string, and quotes around a text are removed."""
    allows_text, others = "string" in types, tuple(kind for name in types for kind in _TYPES.get(name, ()))
    try:
        json, value = text.strip(), orjson.loads(text)
    except orjson.JSONDecodeError:
        is_open = text.lstrip()[:1] in ("{", "[")
        tried = repaired(text, is_certain=not types & {"object", "array"}) if is_open or not allows_text else None
        if tried is None:
            return orjson.dumps(text if allows_text else text.strip()).decode()
        json, value = tried
    if isinstance(value, str) and others and not allows_text:
        inner = repaired(value)
        return inner[0] if inner is not None and isinstance(inner[1], others) else json
    is_text = allows_text and not isinstance(value, (*others, str))
    return orjson.dumps(text).decode() if is_text else json
