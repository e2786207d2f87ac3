"""Calls whose parameters stand between tags, as text: written as JSON while they come.

    qwen3_coder   <function=f>\\n<parameter=city>\\nParis\\n</parameter>\\n</function>
    glm           <tool_call>f\\n<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value>\\n</tool_call>
    minimax_m2    <invoke name="f">\\n<parameter name="city">Paris</parameter>\\n</invoke>

A parameter's schema decides what its text is. A string is sent as it comes; any other value is sent when it is
complete, as the JSON that it is, or as a string where it is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from protos.value import Value
from router.text.stop_strings import overlap
from router.tools.calls import CallDelta, Function, HeldText, Part, say

_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,), "integer": (int,), "number": (int, float), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


class ParameterTags(Value, frozen=True, kw_only=True):
    """`begin` and `end` stand around a call, and `name_ends` behind its name, of which the last two also begin what
    follows. `key` and `value` stand before a parameter's name and behind it, `close` behind its value. `dropped` stand
    around calls. With `is_lined` a value has a line's end before it and behind it."""

    begin: str
    end: str
    name_ends: Sequence[str]
    key: str
    value: str
    close: str
    dropped: Sequence[str] = ()
    is_lined: bool = False


class ParameterCalls(HeldText):
    """Text, and calls between tags. White space before a call and after the last one is dropped."""

    def __init__(self, tags: ParameterTags, functions: Sequence[Function]) -> None:
        super().__init__()
        self._tags = tags
        self._functions = {one.name: one.properties() for one in functions}
        self._properties: Mapping[str, Any] = {}
        self._state = self._text
        self._num_parameters = 0
        self._value: list[str] | None = None  # of a parameter that is sent when it is complete
        self._types: frozenset[str] = frozenset()
        self._is_fresh = False

    def _take(self, parts: list[Part]) -> bool:
        return self._state(parts)

    def end(self) -> list[Part]:
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._state == self._inside_value:
            self._write(held, parts)
            self._end_value(parts)
        if self._state in (self._inside_value, self._between):
            self._tell("}" if self._num_parameters else "{}", parts)
            self.num_calls += 1
        elif self._state == self._name:
            say(parts, self._tags.begin + held)
        elif held.strip() or not self.num_calls:
            say(parts, held)
        return parts

    def _text(self, parts: list[Part]) -> bool:
        tags = (self._tags.begin, *self._tags.dropped)
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if not found:
            kept = max(overlap(self._held, tag) for tag in tags)
            before = self._held[: len(self._held) - kept].rstrip()
            say(parts, before)
            self._held = self._held[len(before) :]
            return False
        at, tag = min(found)
        say(parts, self._held[:at].rstrip())
        self._held = self._held[at + len(tag) :]
        if tag == self._tags.begin:
            self._state = self._name
        return True

    def _name(self, parts: list[Part]) -> bool:
        found = [(at, end) for end in self._tags.name_ends if (at := self._held.find(end)) > 0]
        if not found:
            return False
        at, end = min(found)
        name = self._held[:at].strip()
        if not name:  # no call has begun
            say(parts, self._tags.begin + self._held[:at] + end)
            self._held, self._state = self._held[at + len(end) :], self._text
            return True
        self._held = self._held[at:] if end in (self._tags.key, self._tags.end) else self._held[at + len(end) :]
        self._properties, self._num_parameters, self._state = self._functions.get(name, {}), 0, self._between
        parts.append(CallDelta(index=self.num_calls, name=name))
        return True

    def _between(self, parts: list[Part]) -> bool:
        """Between two parameters."""
        key, end = self._held.find(self._tags.key), self._held.find(self._tags.end)
        if end >= 0 and not 0 <= key < end:
            self._held = self._held[end + len(self._tags.end) :]
            self._tell("}" if self._num_parameters else "{}", parts)
            self.num_calls += 1
            self._state = self._text
            return True
        if key < 0:
            return False
        name, tag, behind = self._held[key + len(self._tags.key) :].partition(self._tags.value)
        if not tag:
            return False
        name = name.strip().removesuffix("</arg_key>").strip()
        self._types = _types_of(self._properties.get(name))
        is_text = "string" in self._types and self._types <= {"string"}
        self._value, self._held, self._state, self._is_fresh = None if is_text else [], behind, self._inside_value, True
        head = ("{" if not self._num_parameters else ", ") + orjson.dumps(name).decode() + ": "
        self._tell(head + ('"' if is_text else ""), parts)
        self._num_parameters += 1
        return True

    def _inside_value(self, parts: list[Part]) -> bool:
        close = ("\n" if self._tags.is_lined else "") + self._tags.close
        at = self._held.find(self._tags.close)
        if at < 0:
            kept = max(overlap(self._held, close), overlap(self._held, self._tags.close))
            self._write(self._held[: len(self._held) - kept], parts)
            self._held = self._held[len(self._held) - kept :]
            return False
        value, self._held = self._held[:at], self._held[at + len(self._tags.close) :]
        self._write(value.removesuffix("\n") if self._tags.is_lined else value, parts)
        self._end_value(parts)
        self._state = self._between
        return True

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
        self._tell('"' if self._value is None else _json("".join(self._value), self._types), parts)

    def _tell(self, arguments: str, parts: list[Part]) -> None:
        parts.append(CallDelta(index=self.num_calls, arguments=arguments))


def _types_of(schema: Any) -> frozenset[str]:
    """Names of the types that a schema allows; empty: any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset((found,))
    if isinstance(found, list):
        return frozenset(one for one in found if isinstance(one, str))
    if isinstance(values := schema.get("enum"), list) and values and all(isinstance(one, str) for one in values):
        return frozenset(("string",))
    branches = [_types_of(one) for one in schema.get("anyOf") or schema.get("oneOf") or ()]
    return frozenset().union(*branches) if all(branches) else frozenset()


def _json(text: str, types: frozenset[str]) -> str:
    """The text where it is JSON of one of the types, else as a JSON string. Where a string is allowed, too, only a
    value of another of the types is no string."""
    text = text.strip() if "string" not in types else text
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text) if "string" not in types else text
        return orjson.dumps(value).decode()
    is_other = isinstance(value, tuple(kind for one in types for kind in _TYPES.get(one, ())))
    return orjson.dumps(text).decode() if "string" in types and not is_other else text
