"""The grammar of a constrained answer (`SamplingParams.grammar`): made here, and checked before a worker gets the
request (`router.text.grammar.checker`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from protos.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 1024

# Between two tokens of JSON: as people and models write it, on one line or indented. Some models go on with white space
# as long as they may.
_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,24}"

MAX_EBNF_CHARS = 4096  # the library's reader takes the square of the length
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_ANNOTATIONS = frozenset(
    "password byte binary int32 int64 float double decimal base64 base64url path file-path directory-path json-string "
    "color phone".split()
)
"""Formats of OpenAPI and pydantic that say what a value is for; JSON Schema has none of them."""
_OF_URI = "#/:?=&%~+,;@!$'()*"  # characters of a reference besides letters, digits and _.-~
_VALUES = ("const", "enum", "default", "examples")

_INTEGERS = {"minimum": 1024 - 2**63, "maximum": 2**63 - 1024}  # the library's float64 rounds larger ones beyond int64
"""Where a schema sets no bound: small models go on with digits as long as they may."""

_OPTIONS = "x-guidance"  # the library's options in a schema would decide whitespace and strictness


def json_grammar(schema: Mapping[str, Any], *, lenient: bool = False, compact: bool = False) -> str:
    schema = _readable(_without_options(schema, lenient))
    try:
        return LLMatcher.grammar_from_json_schema(orjson.dumps(schema).decode(), overrides=_options(lenient, compact))
    except (TypeError, ValueError) as error:  # nested too deeply, mostly
        raise InvalidRequest(f"the JSON Schema cannot be read: {error}") from error


def inline_json(schema: Mapping[str, Any], *, lenient: bool = False, compact: bool = False) -> str:
    """The same, as a rule's right side in a Lark grammar."""
    options = {_OPTIONS: _options(lenient, compact)}
    return f"%json {orjson.dumps({**_readable(_without_options(schema, lenient)), **options}).decode()}"


def lark_grammar(grammar: str) -> str:
    """Returns a Lark grammar, from Lark or from EBNF in the form of GBNF (rules with `::=`). Raises InvalidRequest."""
    if not _EBNF_RULE.search(grammar):
        return grammar
    param, reads = "structured_outputs.grammar", "it has rules with '::=', so it is read as EBNF (GBNF)"
    if len(grammar) > MAX_EBNF_CHARS:
        problem = f"'{param}' has {len(grammar)} characters: {reads}, which may have at most {MAX_EBNF_CHARS}"
        raise InvalidRequest(f"{problem}; give a Lark grammar, whose rules are 'start: \"a\" | other'", param=param)
    try:
        return gbnf_to_lark(re.sub(r"\s*\n\s*\|", " |", grammar))
    except Exception as error:  # the library raises plain ones
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"'{param}' cannot be read: {reads}: {why}", param=param) from error


def regex_grammar(regex: str) -> str:
    """A grammar for texts that the whole regular expression matches (Rust's `regex`: no look-around)."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(literal(choice) for choice in choices)


def literal(text: str) -> str:
    """A text as a literal of Lark, like JSON's with one more escaped character."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")


def _without_options(schema: Mapping[str, Any], lenient: bool) -> Mapping[str, Any]:
    if _OPTIONS not in schema:
        return schema
    if not lenient:
        raise InvalidRequest(
            f"the JSON Schema has #/{_OPTIONS}: a schema cannot set these, leave it out; for compact JSON, "
            "set 'disable_any_whitespace' in 'structured_outputs'"
        )
    return {name: value for name, value in schema.items() if name != _OPTIONS}


def _readable(schema: Any) -> Any:
    """The schema as the library reads it: references are URIs, and formats that are annotations are left out."""
    if isinstance(schema, list):
        return [_readable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            read[name] = quote(value, _OF_URI)
        elif name != "format" or not isinstance(value, str) or value not in _ANNOTATIONS:
            read[name] = value if name in _VALUES else _readable(value)
    types = read.get("type")
    if types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types):
        return _INTEGERS | read
    return read


def _options(lenient: bool, compact: bool) -> JsonCompileOptions:
    if compact:
        return {"whitespace_flexible": False, "lenient": lenient}
    return {"whitespace_pattern": _WHITESPACE, "lenient": lenient}
