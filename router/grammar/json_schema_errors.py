"""Locates the fault in a JSON Schema, and suggests a fix. llguidance's errors name the keyword but not its place, so
the place is searched for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from protos.grammars import in_our_words

MAX_PLACES = 3
MAX_VALUE_CHARS = 100
_OF_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_OF_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_OF_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES = "array, boolean, integer, null, number, object, string"
_LEAVE_OUT = 'leave it out, or ask with "strict": false (response_format, tools), which passes over it'
_KINDS = {
    "array": "a list",
    "an array": "a list",
    "string": "strings",
    "positive integer": "a whole number from 0 on",
    "f64": "a number",
}

Said = re.Match[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """One of a schema or of a schema within: `place` is a JSON Pointer."""

    place: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Fault:
    """A pattern of the library's errors, the keyword it is about, the message for the client, and whether it shows the
    value."""

    said: str
    means: Callable[[Keyword, Said], bool]
    told: str
    value: bool = True


def _named(*names: str) -> Callable[[Keyword, Said], bool]:
    return lambda word, said: word.name in names


def _with_text(*names: str) -> Callable[[Keyword, Said], bool]:
    """The one of these keywords whose value contains the text that the library quotes."""
    return lambda word, said: word.name in names and said["text"] in _texts(word)


_FAULTS = (
    _Fault("Invalid type: (?P<text>.*)", _with_text("type"), f"there is no such type: give one of {_TYPES}"),
    _Fault(
        "type must be a string",
        lambda word, said: word.name == "type" and not _texts(word),
        f"give one of {_TYPES}, or a list of them",
    ),
    _Fault(
        r"Unimplemented keys: \[(.*)\]",
        lambda word, said: f'"{word.name}"' in said[1],
        f"this keyword cannot be enforced: {_LEAVE_OUT}",
        value=False,
    ),
    _Fault(
        "oneOf constraints",
        _named("oneOf"),
        "alternatives of which more than one may fit cannot be enforced: write anyOf, or tell them apart by a required "
        "property with a const",
        value=False,
    ),
    _Fault("Unknown format: (?P<text>.*)", _with_text("format"), f"this format cannot be enforced: {_LEAVE_OUT}"),
    _Fault(
        "Pointer '(.*)' does not exist",
        lambda word, said: word.name == "$ref" and said[1] in str(word.value),
        "there is nothing at that place: correct it",
    ),
    _Fault(
        "Resource '(.*?)'",
        lambda word, said: word.name == "$ref" and said[1] in str(word.value),
        "schemas elsewhere are not fetched: put it under $defs, and refer to #/$defs/...",
    ),
    _Fault(
        "Expected (?P<kind>.+?) for '(?P<name>.+?)'.*, got (?P<got>.*)",
        lambda word, said: word.name == said["name"] and _has(word, said["got"]),
        "give {kind}",
    ),
    _Fault(
        r"(?P<name>\S+) must be (?P<kind>an? [a-z]+)",
        lambda word, said: word.name == said["name"] and not _is(word.value, said["kind"]),
        "give {kind}",
    ),
    _Fault("schema must be an object or boolean", _named(""), "that is no schema: give an object, true or false"),
    _Fault(
        r"(?P<low>\w+) \((?P<least>.+?)\) is greater than (?P<high>\w+) \((?P<most>.+?)\)",
        lambda word, said: word.name == said["low"] and _number(word.value) == _number(said["least"]),
        "more than {high}, which is {most}: nothing fits",
    ),
    _Fault(
        "required property '(?P<text>.*)' is unsatisfiable",
        _with_text("required"),
        "nothing can be its '{text}': describe it in properties, so that some value fits",
    ),
    _Fault(
        "anyOf is empty",
        lambda word, said: word.name in ("anyOf", "enum") and word.value == [],
        "nothing fits: give at least one",
    ),
    _Fault(
        r"regex parse error:\n\s*(?P<text>[^\n]*)\n(?s:.*?)error: (?P<why>[^\n]*)",
        _with_text("pattern", "patternProperties"),
        "it cannot be read as a pattern ({why}): correct it",
    ),
    _Fault(
        "lookarounds not supported.* in regex /(?P<text>.*)/",
        _with_text("pattern", "patternProperties"),
        "look-around, as \\b is, cannot be enforced: write the pattern without",
    ),
    _Fault("invalid multiple of", _named("multipleOf"), "give a number above 0"),
)


_PATTERN = '{"grammars":[{"name":"regex"'
_OF_PATTERN = re.compile(r"regex parse error:\n(?s:.*?)error: ([^\n]*)|lookarounds not supported")


def explained(error: str, grammar: str) -> str:
    """The library's error for a grammar, with the place in the schema, if there is one."""
    try:
        return _explained(error, grammar)
    except RecursionError:  # nested so deeply that its place would not help
        return in_our_words(error)


def _explained(error: str, grammar: str) -> str:
    if grammar.startswith(_PATTERN) and (matched := _OF_PATTERN.search(error)) is not None:
        why = matched[1] or "look-around, as \\b is, is not supported"
        return f"it cannot be read as a pattern ({why}): correct it"
    schema, owner = _schema(error, grammar) if error else (None, "")
    for fault in _FAULTS if schema is not None else ():
        if (matched := re.search(fault.said, error)) is not None:
            found = islice((word for word in keywords(schema) if fault.means(word, matched)), MAX_PLACES)
            if places := [_place(word, fault) for word in found]:
                facts = matched.groupdict()
                facts["kind"] = _KINDS.get(facts.get("kind", ""), facts.get("kind", ""))
                return f"{' or '.join(places)}{owner}: {fault.told.format(**facts)}"
    return in_our_words(error)


def keywords(schema: Any, place: str = "#") -> Iterator[Keyword]:
    """All schemas within a schema. A value that should be a schema but is not is yielded as a keyword without a
    name."""
    if not isinstance(schema, dict):
        if not isinstance(schema, bool):
            yield Keyword(place=place, name="", value=schema)
        return
    for name, value in schema.items():
        at = f"{place}/{_escaped(name)}"
        yield Keyword(place=at, name=name, value=value)
        if name in _OF_ONE:
            yield from keywords(value, at)
        elif name in _OF_MANY and isinstance(value, list):
            for number, one in enumerate(value):
                yield from keywords(one, f"{at}/{number}")
        elif name in _OF_NAMED and isinstance(value, dict):
            for key, one in value.items():
                yield from keywords(one, f"{at}/{_escaped(key)}")


def _schema(error: str, grammar: str) -> tuple[Any, str]:
    """The schema that is meant, and whose it is where a grammar has several; None where none is."""
    if grammar.startswith('{"grammars"'):
        return json.loads(grammar)["grammars"][0].get("json_schema"), ""
    at = re.match(r"at (\d+)\(\d+\): failed to compile JSON schema", error)
    if at is None:
        return None, ""
    lines = grammar.split("\n")
    first = int(at[1]) - 1
    _, found, text = "\n".join(lines[first:]).partition("%json")
    if not found:
        return None, ""
    named = re.search(r'\{\\"name\\": \\"([^"\\]+)', lines[first - 1]) if first else None  # as in tool calls
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0], f" in what {named[1]} takes" if named else ""
    except ValueError:
        return None, ""


def _place(word: Keyword, fault: _Fault) -> str:
    if not fault.value:
        return word.place
    value = json.dumps(word.value, ensure_ascii=False)
    return f"{word.place} = {value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS] + '...'}"


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _texts(word: Keyword) -> list[str]:
    """The texts that a keyword has for its value, or for the names in it."""
    values = [word.value] if isinstance(word.value, str) else word.value
    return [one for one in values if isinstance(one, str)] if isinstance(values, list | dict) else []


def _has(word: Keyword, got: str) -> bool:
    """Is it what the library got, or is that in it?"""
    values = [word.value, *word.value] if isinstance(word.value, list) else [word.value]
    return got in [json.dumps(value, separators=(",", ":"), ensure_ascii=False) for value in values]


def _is(value: Any, kind: str) -> bool:
    kinds: dict[str, type | tuple[type, ...]] = {"an object": dict, "an array": list, "a string": str}
    return kind.strip() in kinds and isinstance(value, kinds[kind.strip()])


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
