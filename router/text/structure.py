"""What an answer must be, as a grammar that workers follow (`SamplingParams.grammar`): written here, and checked before
anybody works on the request.

A grammar is llguidance's: its Lark, with JSON Schemas in it, or what its own functions make of a schema or a regex.
Workers compile it once more, against their tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protos.errors import InvalidRequest, Overloaded
from protos.threads import DeepThreads

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 128 * 1024
"""Of a grammar with all its schemas: one of this size compiles in about a tenth of a second."""

MAX_CHOICES = 1024
MAX_CHECKED = 1024
MAX_TOLD_CHARS = 1000
"""Of what is wrong with a grammar: the library may quote all of it."""
CHECK_S = 10.0
"""A grammar that is compiled for longer cannot be stopped: whoever sent it, and those behind it, wait no longer."""

# Between two tokens of JSON: as people and models write it, on one line or indented. Some models go on with white space
# for as long as they may.
_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,24}"
# Bounds the work of compiling by counting it, so that what is refused does not depend on how busy the machine is. Of
# intersections (`&`, `allOf` of patterns) what is counted as one may take long: for them there is `CHECK_S`.
_LIMITS = LLParserLimits(verbose_errors=False)


def json_grammar(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON that the schema accepts. A `lenient` grammar passes over keywords that cannot be enforced.

    Raises InvalidRequest for a schema that cannot be read.
    """
    try:
        return LLMatcher.grammar_from_json_schema(orjson.dumps(schema).decode(), overrides=_options(lenient))
    except (TypeError, ValueError) as error:  # nested too deeply, mostly
        raise InvalidRequest(f"the JSON Schema cannot be read: {error}") from error


def inline_json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """The same, as a rule's right side in a Lark grammar."""
    return f"%json {orjson.dumps({**schema, 'x-guidance': _options(lenient)}).decode()}"


def regex_grammar(regex: str) -> str:
    """Text that the whole of a regular expression matches (the syntax of Rust's `regex`: no look-around)."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of the texts."""
    return "start: " + " | ".join(literal(choice) for choice in choices)


def literal(text: str) -> str:
    """A text in a Lark grammar, whose literals are JSON's, but for one character more that must be escaped."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")


def _options(lenient: bool) -> JsonCompileOptions:
    return {"whitespace_pattern": _WHITESPACE, "lenient": lenient}


class GrammarChecks:
    """Whether grammars can be compiled, found out beside the event loop and remembered."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, str] = OrderedDict()
        self._thread = DeepThreads("grammar-checks")

    async def check(self, grammar: str, *, param: str) -> None:
        """Raises InvalidRequest with what is wrong, Overloaded where that is not found out in `CHECK_S`."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            told = f"'{param}' makes a grammar of {len(grammar)} characters"
            raise InvalidRequest(f"{told}: at most {MAX_GRAMMAR_CHARS} are read", param=param)
        name = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        wrong = self._found.get(name)
        if wrong is None:
            try:
                async with asyncio.timeout(CHECK_S):
                    wrong = await asyncio.get_running_loop().run_in_executor(self._thread, _what_is_wrong, grammar)
            except TimeoutError:
                told = f"'{param}' was not compiled within {CHECK_S:g} s: simplify it if it is large, or come again"
                raise Overloaded(told, param=param, retry_after_s=CHECK_S) from None
            self._found[name] = wrong
            if len(self._found) > MAX_CHECKED:
                self._found.popitem(last=False)
        if wrong:
            raise InvalidRequest(f"'{param}' cannot be enforced: {wrong}", param=param)


def _what_is_wrong(grammar: str) -> str:
    """Compiled as workers do it, for a vocabulary of bytes: `validate_grammar` stops before what may take the most, and
    before limits that workers would run into with an engine waiting."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=_LIMITS)
    return matcher.get_error()[:MAX_TOLD_CHARS] if matcher.is_error() else ""


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
