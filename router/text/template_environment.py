"""The environment of chat templates: that of `transformers.apply_chat_template`, sandboxed and immutable, with the same
filters, functions and white space, so that the same messages give the same prompt.

Also a script of `protos.limited`, for templates that may cost too much, so it imports nothing from this project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A template is a program of the checkpoint's author; these are its ways of failing on messages it did not expect.
TEMPLATE_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
MAX_CHARS = 2**26
"""Characters of a prompt."""
_NO_LETTERS = re.compile(r"[\W_]+")
_VEILED = "\udcff"  # in no request: it is no text
_NOT_ASCII = re.compile("[^\0-\x7f\udc80-\udfff]+")  # and no mark (`router.text.control`)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's tokens for training; a server reads through it."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def complete(
    environment: ImmutableSandboxedEnvironment, local_time: Callable[[], datetime] = datetime.now
) -> ImmutableSandboxedEnvironment:
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.add_extension(_Generation)
    environment.add_extension(jinja2.ext.loopcontrols)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: local_time().strftime(form)
    return environment


def folded(text: str) -> str:
    """The same for a text in every case. The case of a dotless i is folded in its upper case only."""
    return _NO_LETTERS.sub("", text.upper().casefold())


class Veiled(str):
    """A text with marks in place of its letters. Its methods answer as those of the text, so that templates find keys,
    compare values and search as ever, and what they return is veiled as well. Joined to another string it becomes an
    ordinary one, with the marks.

    The text is private: Jinja's sandbox gives no template an attribute that begins with `_`."""

    __slots__ = ("_text", "_veils")
    _text: str
    _veils: Mapping[int, str]

    @classmethod
    def of(cls, text: str, veils: Mapping[int, str]) -> Veiled:
        veiled = cls(text.translate(veils))
        veiled._text, veiled._veils = text, veils
        return veiled

    def _hide(self, answer: Any) -> Any:
        match answer:
            case str():
                return self.of(answer, self._veils)
            case list():
                return [self._hide(part) for part in answer]
            case tuple():
                return tuple(self._hide(part) for part in answer)
            case _:
                return answer

    def __str__(self) -> str:
        return self  # for Jinja's filters and tests, which call `str` first

    def __iter__(self) -> Iterator[str]:
        return map(self._hide, self._text)

    def replace(self, old: str, new: str, /, count: Any = -1) -> str:
        """Replaces in a veiled text. A string of the template stays as it is, and inserting into it makes an ordinary
        string."""
        old, own = _unveiled(old), _unveiled(new)
        if old and folded(own):
            return str.join(new, self._hide(self._text.split(old, count)))
        return self.of(self._text.replace(old, own, count), self._veils)


_LIKE_THE_TEXT = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__", "__getitem__",
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper",
    "lower", "upper", "title", "capitalize", "casefold", "swapcase", "strip", "lstrip", "rstrip",
    "removeprefix", "removesuffix", "split", "rsplit", "splitlines", "partition", "rpartition",
)  # fmt: skip


def _like_the_text(method: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: Veiled, *arguments: Any, **named: Any) -> Any:
        named = {name: _unveiled(value) for name, value in named.items()}
        return self._hide(method(self._text, *map(_unveiled, arguments), **named))

    return answer


for _name in _LIKE_THE_TEXT:
    setattr(Veiled, _name, _like_the_text(getattr(str, _name)))


def _unveiled(value: Any) -> Any:
    match value:
        case Veiled():
            return value._text
        case tuple():  # prefixes or suffixes
            return tuple(map(_unveiled, value))
        case _:
            return value


def written(source: str, variables: Mapping[str, Any]) -> bytes:
    return json.dumps([source, _packed(variables)]).encode()


def _packed(value: Any) -> Any:
    if isinstance(value, Veiled):
        return {_VEILED: value._text, "veils": value._veils}
    if isinstance(value, Mapping):
        return {name: _packed(part) for name, part in value.items()}
    return [_packed(part) for part in value] if isinstance(value, list | tuple) else value


def _unpacked(mapping: dict[str, Any]) -> Any:
    if _VEILED not in mapping:
        return mapping
    return Veiled.of(mapping[_VEILED], {int(char): mark for char, mark in mapping["veils"].items()})


def make_answer() -> Callable[[bytes], bytes]:
    compiled = cache(complete(ImmutableSandboxedEnvironment()).from_string)

    def answer(request: bytes) -> bytes:
        source, variables = json.loads(request, object_hook=_unpacked)
        try:
            text = compiled(source).render(variables)
            if len(text) > MAX_CHARS:
                raise ValueError(f"it writes {len(text):,} characters, more than {MAX_CHARS:,}")
        except TEMPLATE_FAILURES as error:
            return json.dumps(["", str(error)[:1000] or type(error).__name__]).encode()
        return json.dumps([text, ""]).encode()

    return answer


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
