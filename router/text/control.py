"""Which texts of a prompt are control, because the chat template wrote them, and which only look so (docs/adr/0027).

    strings of a request ──mark──▶ template ──▶ marked text ──read──▶ Rendered: text, spans of the template's control

A mark stands for one character of content, so lengths and positions stay. Marks are lone surrogates: no request holds
one, for JSON in UTF-8 has none. A control text with a mark in it was not written by the template alone.

A template may also write the two ends of a control text around a word of the request: `'<' ~ key ~ '>'`. Words that
could stand there are *suspect*. A request with suspect words is rendered twice: with these words as they are, and with
every letter of them marked (*veiled*). The second rendering has the template's own control texts only, so the first one
is kept if it has the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import orjson

from protos.codec import Value
from router.text.template_environment import Veiled, folded

_MARKS = range(0xDC80, 0xE000)

_MAX_WHOLE_CHARS = (
    1000  # characters of a suspect message: longer than any control text, with the signs that a template may drop
)
_CASED = range(0x20000)  # no character above has an upper or a lower case

Span = tuple[int, int]


class Rendered(Value, frozen=True, kw_only=True):
    """A rendered conversation. Only the `spans` of its text are control; None: every control text is the template's."""

    text: str
    controls: ControlTexts
    spans: tuple[Span, ...] | None = None

    def written_controls(self) -> list[str]:
        spans = self.controls.spans(self.text) if self.spans is None else self.spans
        return [self.text[start:end] for start, end in spans]


class ControlTexts:
    """Texts that are tokens with a meaning for the model: `special` ones, and tags that the chat template writes, such
    as <tool_call>."""

    def __init__(
        self, added: Mapping[str, bool], *, constants: Collection[str] = (), written: Collection[str] = ()
    ) -> None:
        """`added` tokens by their text, and whether each is special; `constants`: the template's strings, for which it
        may search content; `written`: its text outside of expressions."""
        special = {text for text, is_special in added.items() if is_special and text.strip()}
        own = (*constants, *written)
        tags = {text for text in added.keys() - special if _signs(text) and any(text in string for string in own)}
        self.texts = frozenset(special | tags)
        self._pattern = re.compile(any_of(self.texts) if self.texts else "(?!)")
        self.of_client = _Rule(self.texts, constants)
        self.of_model = _Rule(special, constants)
        letters = {char for text in self.texts for char in text}
        chars = sorted(letters | _cases_of(letters), key=lambda char: (char not in letters, char.isalnum(), char))
        self.marks = {char: chr(mark) for char, mark in zip(chars, _MARKS, strict=False)}
        parted = any(_is_parted(text, own) for text in self.texts)
        insides = {inside for text in self.texts if (inside := folded(text))} if parted else set()
        self.has_insides = bool(insides)
        self._joined_insides = "\n".join(sorted(insides))
        self._inside = re.compile(any_of(insides) if insides else "(?!)")
        self._veils = {ord(char): mark for char, mark in self.marks.items() if not char.isspace()}

    def is_suspect(self, text: str, *, whole: bool = False) -> bool:
        """Whether a template could build a control text from this one and its constants. Only letters and digits count,
        in any case, because a template may replace other characters (`key | replace('-', '_')`) and change the case. A
        `whole` text is written as it is; of any other a template may use a part."""
        if not self.has_insides or (whole and len(text) > _MAX_WHOLE_CHARS) or not (inside := folded(text)):
            return False
        return inside in self._joined_insides or (not whole and self._inside.search(inside) is not None)

    def veiled(self, text: str) -> str:
        return Veiled.of(text, self._veils)

    def spans(self, text: str) -> tuple[Span, ...]:
        return tuple(match.span() for match in self._pattern.finditer(text))


class _Rule:
    """Characters to mark: every character at the start or end of a control text, so that a template that cuts and joins
    content makes none. Constants of the template that are not part of a control text stay unmarked, as the template may
    search for them."""

    def __init__(self, controls: Collection[str], constants: Iterable[str]) -> None:
        self.signs = sorted({sign for text in controls for sign in _signs(text)})
        self.words = [text for text in controls if not _signs(text)]  # without such characters: marked as a whole
        self.visible = [
            constant
            for constant in constants
            if not set(self.signs).isdisjoint(constant) and not any(_meet(constant, text) for text in controls)
        ]
        groups = {"visible": self.visible, "word": self.words, "sign": self.signs}
        parts = [f"(?P<{name}>{any_of(texts)})" for name, texts in groups.items() if texts]
        self.pattern = re.compile("|".join(parts) or "(?!)")

    def concerns(self, text: str) -> bool:
        for sign in self.signs:  # a generator would take twice the time
            if sign in text:
                return True
        return bool(self.words) and any(word in text for word in self.words)


class Marks:
    """The marks of one rendering. With `veils` they hide suspect texts."""

    def __init__(self, controls: ControlTexts, *, veils: bool = False) -> None:
        self._controls = controls
        self._veils = veils
        self._used: set[str] = set()
        self.has_suspects = False

    def content(self, text: str, *, is_model: bool = False) -> str:
        """The text of a message. The model's own messages keep their tags, for which templates search."""
        controls = self._controls
        return self._hidden(text, controls.of_model if is_model else controls.of_client, whole=True)

    def json(self, value: Any) -> Any:
        controls = self._controls
        if not value or not (controls.has_insides or controls.of_client.concerns(orjson.dumps(value).decode())):
            return value
        return self._json(value, controls.of_client)

    def read(self, marked: str) -> Rendered:
        controls, text = self._controls, marked
        if not self._used:
            return Rendered(text=text, controls=controls)
        for char in self._used:
            text = text.replace(controls.marks[char], char)
        if all(marked[start:end] == text[start:end] for start, end in controls.spans(text)):
            return Rendered(text=text, controls=controls)
        return Rendered(text=text, controls=controls, spans=controls.spans(marked))

    def _json(self, value: Any, rule: _Rule) -> Any:
        match value:
            case str():
                return self._hidden(value, rule)
            case list():
                return [self._json(part, rule) for part in value]
            case dict():
                return {self._json(name, rule): self._json(part, rule) for name, part in value.items()}
            case _:
                return value

    def _hidden(self, text: str, rule: _Rule, *, whole: bool = False) -> str:
        if self._controls.is_suspect(text, whole=whole):
            self.has_suspects = True
            if self._veils:
                self._used.update(self._controls.marks)
                return self._controls.veiled(text)
        return self._marked(text, rule) if rule.concerns(text) else text

    def _marked(self, text: str, rule: _Rule) -> str:
        if rule.words or any(constant in text for constant in rule.visible):
            return rule.pattern.sub(self._replaced, text)
        for sign in rule.signs:
            if sign in text:
                text = text.replace(sign, self._mark(sign))
        return text

    def _replaced(self, match: re.Match[str]) -> str:
        if match.lastgroup == "visible":
            return match[0]
        rest = match[0].lstrip()  # a mark is no white space, and must not keep any from being trimmed
        return match[0][: len(match[0]) - len(rest)] + self._mark(rest[0]) + rest[1:]

    def _mark(self, char: str) -> str:
        self._used.add(char)
        return self._controls.marks[char]


def _signs(text: str) -> Sequence[str]:
    signs = [char for char in text if not char.isalnum() and not char.isspace()]
    return signs[:1] + signs[1:][-1:]


def _cases_of(letters: Collection[str]) -> set[str]:
    return {char for char, cases in _all_cases().items() if not cases.isdisjoint(letters)}


@cache
def _all_cases() -> Mapping[str, set[str]]:
    cases_of: dict[str, set[str]] = {}
    for start in range(_CASED.start, _CASED.stop, 256):
        block = "".join(map(chr, range(start, start + 256)))
        if block.lower() != block or block.upper() != block:  # a few blocks of many
            cases_of |= {char: cases for char in block if len(cases := _changed(_changed({char}))) > 1}
    return cases_of


def _changed(chars: set[str]) -> set[str]:
    return chars.union(*({*char.lower(), *char.upper(), *char.title(), *char.casefold()} for char in chars))


def _is_parted(text: str, own: Collection[str]) -> bool:
    """Whether the text could be built from the template's `own` strings with content between them."""
    signs = _signs(text)
    if not signs:
        return True
    is_begun = any(string.endswith(text[:size]) for size in range(1, len(text)) for string in own)
    if is_begun or text[0] == signs[0]:
        return is_begun
    return any(
        string in text or any(string.startswith(text[-size:]) for size in range(1, len(text)))
        for string in own
        if string
    )


def _meet(constant: str, text: str) -> bool:
    sizes = range(1, min(len(constant), len(text)))
    ends = any(constant.endswith(text[:size]) or text.endswith(constant[:size]) for size in sizes)
    return ends or constant in text or text in constant


def any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of the texts that reads each character once."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: Mapping[str, Any]) -> str:
    ways = [re.escape(char) + _branches(rest) for char, rest in sorted(node.items()) if char]
    if not ways:
        return ""
    joined = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return f"{joined}?" if "" in node else joined
