"""Calls of every format: functions in, parts of calls out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from protos.codec import Value
from router.text.stop_strings import overlap

MAX_REFERENCES = 16


class ParameterType(Value, frozen=True, kw_only=True):
    """Names of the types that a schema allows (empty: any), and the values if it lists them."""

    types: frozenset[str] = frozenset()
    values: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        return self.types == {"string"}


ANY = ParameterType()


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A tool the model may call; `parameters` is a JSON Schema. Of a `strict` one every keyword is enforced."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def properties(self) -> Mapping[str, Any]:
        properties = (self.parameters or {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def types(self) -> Mapping[str, ParameterType]:
        return {name: _type_of(schema, self.parameters, 0) for name, schema in self.properties().items()}


def _type_of(schema: Any, whole: Any, depth: int) -> ParameterType:
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return ANY
    limits = [_type_of(branch, whole, depth + 1) for branch in _listed(schema.get("allOf"))]
    if isinstance(reference := schema.get("$ref"), str):
        limits.append(_type_of(_referred(reference, whole), whole, depth + 1))
    written = schema.get("type")
    names = [written] if isinstance(written, str) else [name for name in _listed(written) if isinstance(name, str)]
    limits.append(ParameterType(types=frozenset(names)))
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    if values:
        limits.append(ParameterType(types=frozenset(map(_type_name, values)), values=tuple(values)))
    for keyword in ("anyOf", "oneOf"):
        branches = [_type_of(branch, whole, depth + 1) for branch in _listed(schema.get(keyword))]
        if branches and all(branch.types for branch in branches):
            has_values = all(branch.values is not None for branch in branches)
            either = tuple(value for branch in branches for value in branch.values or ())
            types = frozenset[str]().union(*(branch.types for branch in branches))
            limits.append(ParameterType(types=types, values=either if has_values else None))
    allowed = ANY
    for limit in limits:
        both = (allowed.types & limit.types) or limit.types or allowed.types
        allowed = ParameterType(types=both, values=allowed.values if limit.values is None else limit.values)
    return allowed


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _referred(reference: str, whole: Any) -> Any:
    start, *steps = unquote(reference).split("/")
    for step in steps if start == "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(whole, list) and name.isdecimal() and int(name) < len(whole):
            whole = whole[int(name)]
        else:
            whole = whole.get(name) if isinstance(whole, Mapping) else None
    return whole if start == "#" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A part of call `index`. The first part has its `name`, later parts have ""."""

    index: int
    name: str = ""
    arguments: str = ""


Part = str | CallDelta
"""Parts of an answer: text, or a part of a call."""


class CallReader(Protocol):
    def feed(self, text: str) -> list[Part]: ...

    def end(self, *, is_whole: bool = False) -> list[Part]:
        """Returns text that was held back as a possible call. An incomplete call is completed if the model ended the
        answer itself (`is_whole`); otherwise it stays cut off."""
        ...

    @property
    def num_calls(self) -> int:
        """The number of calls that are complete."""
        ...


class TextAndCalls:
    """The base of readers of text and calls. `begin` marks precede calls, perhaps after an `outer` mark; marks `behind`
    calls, and white space around calls, are dropped. Text that begins like a call but is none stays text."""

    def __init__(self, begin: Sequence[str], behind: Sequence[str] = (), outer: Sequence[str] = ()) -> None:
        self._begin = tuple(begin)
        self._behind = tuple(behind)
        self._outer = tuple(outer)
        self._is_inside = False  # an outer mark stands before the call
        self._held = ""
        self._opening = ""  # the possible beginning of a call
        self._state: Callable[[list[Part]], bool] = self._text
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held and self._state(parts):
            pass
        return parts

    def end(self, *, is_whole: bool = False) -> list[Part]:
        parts: list[Part] = []
        self._end(parts, is_whole)
        parts += self.feed("")
        text, self._held, self._opening = self._opening + self._held, "", ""
        if text.strip() or not self.num_calls:
            say(parts, text)
        return parts

    def _end(self, parts: list[Part], is_whole: bool) -> None:
        """Ends a call that is being read, and takes its text."""

    def _opened(self, mark: str) -> None:
        """Sets the state after a mark was read."""
        raise NotImplementedError

    def _text(self, parts: list[Part]) -> bool:
        marks = (*self._begin, *self._outer, *(self._behind if self.num_calls else ()))
        at, mark = first_of(self._held, marks)
        before = self._held[:at].rstrip()
        say(parts, before)
        if not mark:
            self._held = self._held[len(before) :]
            return False
        self._opening, self._held = self._held[len(before) : at + len(mark)], self._held[at + len(mark) :]
        self._is_inside = False
        if mark in self._begin:
            self._opened(mark)
        elif mark in self._outer:
            self._state = self._inside_outer
        else:
            self._opening = ""
        return True

    def _inside_outer(self, parts: list[Part]) -> bool:
        self._drop_to(self._held.lstrip())
        begin = next((mark for mark in self._begin if self._held.startswith(mark)), None)
        if begin is not None:
            self._drop_to(self._held.removeprefix(begin))
            self._is_inside = True
            self._opened(begin)
        elif may_begin(self._held, self._begin) == len(self._held):
            return False
        else:
            self._end_opening(parts)
        return True

    def _end_opening(self, parts: list[Part]) -> None:
        say(parts, self._opening)
        self._opening, self._state = "", self._text

    def _drop_to(self, rest: str) -> None:
        self._opening += self._held[: len(self._held) - len(rest)]
        self._held = rest

    def _tell(self, arguments: str, parts: list[Part]) -> None:
        if arguments:
            parts.append(CallDelta(index=self.num_calls, arguments=arguments))


def say(parts: list[Part], text: str) -> None:
    if text:
        parts.append(text)


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """The place of the first mark, and the mark; the longest of several at one place. Without a mark: where one may
    begin at the text's end, and ""."""
    places = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if places:
        at, _, mark = min(places)
        return at, mark
    return len(text) - may_begin(text, marks), ""


def may_begin(text: str, marks: Sequence[str]) -> int:
    return max((overlap(text, mark) for mark in marks), default=0)
