"""The grammar of a constrained answer (`SamplingParams.grammar`): made here, and checked before a worker gets the
request (`router.grammar.checker`).

It is a grammar of llguidance: Lark with JSON Schemas in it, or the output of llguidance's own functions for a schema or
a regex. Workers compile it again, against their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from llguidance import LLMatcher

from protos.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 1024

# Between two tokens of JSON: as people and models write it, on one line or indented. Some models go on with white space
# as long as they may.
_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,24}"

_OPTIONS = "x-guidance"  # the library's, in a schema: they would decide of white space, and how much is enforced


def json_grammar(schema: Mapping[str, Any], *, lenient: bool = False, compact: bool = False) -> str:
    """JSON that the schema accepts. A `lenient` grammar passes over keywords that cannot be enforced; a `compact` one
    has no white space outside of strings.

    Raises InvalidRequest for a schema that cannot be read.
    """
    schema = _without_options(schema, lenient)
    try:
        return LLMatcher.grammar_from_json_schema(orjson.dumps(schema).decode(), overrides=_options(lenient, compact))
    except (TypeError, ValueError) as error:  # nested too deeply, mostly
        raise InvalidRequest(f"the JSON Schema cannot be read: {error}") from error


def inline_json(schema: Mapping[str, Any], *, lenient: bool = False, compact: bool = False) -> str:
    """The same, as a rule's right side in a Lark grammar."""
    options = {_OPTIONS: _options(lenient, compact)}
    return f"%json {orjson.dumps({**_without_options(schema, lenient), **options}).decode()}"


def regex_grammar(regex: str) -> str:
    """Text that the whole of a regular expression matches (the syntax of Rust's `regex`: no look-around)."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of the texts."""
    return "start: " + " | ".join(literal(choice) for choice in choices)


def literal(text: str) -> str:
    """A text in a Lark grammar, whose literals are JSON's, but for one character more that must be escaped."""
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


def _options(lenient: bool, compact: bool) -> JsonCompileOptions:
    if compact:
        return {"whitespace_flexible": False, "lenient": lenient}
    return {"whitespace_pattern": _WHITESPACE, "lenient": lenient}
