"""Tool calls in a model's answer: how each family of models writes them, and how they are parsed while they arrive.

    hermes        text <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call> ...        Hermes, Qwen
    llama3_json   {"name": "f", "parameters": {...}}; {...}      and nothing else           Llama 3.1 and later
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, {...}]   the same        Mistral 7B v0.3, Nemo, Large

A call is sent as soon as its name is known, and its arguments as they arrive, in the model's own text. Text that looks
like a call but is not one stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from router.grammar.structure import inline_json, literal

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_ARGUMENTS = ("arguments", "parameters")


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


# Families whose calls have the same tags but are not JSON: Qwen3-Coder, GLM, later Mistral models.
_OTHERS = ("<function=", "<arg_key>", "[ARGS]")


def format_of(template: str) -> ToolFormat | None:
    """The tool-call format of this chat template; None if the template does not show it."""
    if any(sign in template for sign in _OTHERS):
        return None
    if _OPEN in template:
        return ToolFormat.HERMES
    if _TOOL_CALLS in template:
        return ToolFormat.MISTRAL
    if '{"name": function name, "parameters"' in template or _PYTHON_TAG in template:
        return ToolFormat.LLAMA3_JSON
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A tool the model may call; `parameters` is a JSON Schema. Of a `strict` one every keyword is enforced."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The text around calls: before the first one, before each, between two, after each and after the last one."""

    key: str = "arguments"
    first: str = ""
    before: str = ""
    between: str
    behind: str = ""
    last: str = ""
    text: str = ""
    """An answer that begins otherwise is not a call."""


_WRITTEN = {
    ToolFormat.HERMES: _Written(before="<tool_call>\n", between="\n", behind="\n</tool_call>"),
    ToolFormat.LLAMA3_JSON: _Written(key="parameters", between="; ", text=r"/\s*[^{\s](?s:.*)/"),
    ToolFormat.MISTRAL: _Written(first="[", between=", ", last="]", text=r"/\s*[^\[\s](?s:.*)/"),
}


def calls_grammar(
    form: ToolFormat, functions: Sequence[Function], *, parallel: bool, instead: str = "", free: bool = False
) -> str:
    """A grammar: the answer is tool calls, or what `instead` (the right side of a rule) matches. With `free` any text
    is allowed, too, and calls are in the format's form wherever it allows text beside them."""
    written = _WRITTEN[form]
    before, names = written.before, [f"call{number}" for number in range(len(functions))]
    rules = [f"named: {' | '.join(names)}"]
    if free and form is ToolFormat.HERMES:
        # Any text, up to a call: of alternatives, what ends lazily goes first. The head has the tag and all before it.
        before = before.removeprefix(_OPEN)
        rules += ["TEXT: /(?s:.*)/", f"call: head named\nhead[lazy]: TEXT {literal(_OPEN)}"]
        rules.append("start: call* rest" if parallel else "start: call? rest")
        rules.append(f"rest: {'TEXT' if parallel else 'NO_CALL'}")
        rules.append(f"NO_CALL: TEXT & ~/(?s:.*){_OPEN}(?s:.*)/")
    else:
        more = f" ({literal(written.between)} named)*" if parallel else ""
        around = [literal(one) if one else "" for one in (written.first, written.last)]
        rules.append(f"calls: {around[0]} named{more} {around[1]}")
        rules.append(f"start: calls{' | instead' if instead else ''}{' | TEXT?' if free else ''}")
        if free:
            rules.append(f"TEXT: {written.text}")
    for name, one in zip(names, functions, strict=True):
        begin = literal(f'{before}{{"name": "{one.name}", "{written.key}": ')
        rules.append(f"{name}: {begin} {name}_args {literal('}' + written.behind)}")
        schema = {"type": "object", "additionalProperties": False} if one.parameters is None else one.parameters
        rules.append(f"{name}_args: {inline_json(schema, lenient=not one.strict)}")
    if instead:
        rules.append(f"instead: {instead}")
    return "\n".join(rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A part of call `index`. The first part has its `name`, later parts have ""."""

    index: int
    name: str = ""
    arguments: str = ""


Part = str | CallDelta
"""Parts of an answer: text, or a part of a call."""


class CallReader(Protocol):
    """Reads one answer, in pieces of any size."""

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """Text that was held back because it might have become a call."""
        ...

    @property
    def num_calls(self) -> int:
        """The part of it that was sent."""
        ...


def reader_of(form: ToolFormat, names: Collection[str]) -> CallReader:
    """`names` are those of the tools there are."""
    if form is ToolFormat.HERMES:
        return HermesCalls()
    return MistralCalls(frozenset(names)) if form is ToolFormat.MISTRAL else JsonCalls(frozenset(names))


def new_call_id(form: ToolFormat) -> str:
    """Templates of Mistral's take back no other than nine letters and digits."""
    return uuid.uuid4().hex[:9] if form is ToolFormat.MISTRAL else f"call_{uuid.uuid4().hex[:24]}"


class _Calls:
    """The part that was not sent yet, with its call. `_closing`: the end of a call is still to come."""

    _opening = ""
    """The opening of a call; it is text if no call follows."""

    def __init__(self) -> None:
        self._held = ""
        self._call: _Call | None = None
        self._closing = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held and self._take(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        if self._call is not None and not self._call.begun:
            self._held = self._opening + self._call.raw + self._held
        elif self._call is not None or self._closing:
            self._held = ""
        if self._held.strip() or not self.num_calls:
            _say(parts, self._held)
        self._held, self._call = "", None
        return parts

    def _take(self, parts: list[Part]) -> bool:
        """Consumes a part of the held text. False: it needs more text, or has consumed all."""
        raise NotImplementedError


class HermesCalls(_Calls):
    """Text, and calls between tags. White space before a call and after the last one is dropped."""

    _opening = _OPEN

    def _take(self, parts: list[Part]) -> bool:
        if self._call is not None:
            return self._take_call(self._call, parts)
        if self._closing:
            rest = self._held.lstrip()
            if not rest.startswith(_CLOSE) and _CLOSE.startswith(rest):
                return False
            self._closing, self._held = False, rest.removeprefix(_CLOSE)
            return True
        before, tag, behind = self._held.partition(_OPEN)
        if tag:
            _say(parts, before.rstrip())
            self._call, self._held = _Call(self.num_calls), behind
            return True
        kept = _num_open(self._held)
        _say(parts, self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _take_call(self, call: _Call, parts: list[Part]) -> bool:
        self._held = call.feed(self._held, parts)
        if call.broken and call.begun:  # the rest cannot be parsed: all of it up to the tag becomes arguments
            inside, tag, behind = self._held.partition(_CLOSE)
            kept = 0 if tag else _num_begun(inside, _CLOSE)
            call.tell(inside[: len(inside) - kept], parts)
            self._held = behind if tag else inside[len(inside) - kept :]
            self._call = None if tag else call
            self.num_calls += bool(tag)
            return bool(tag)
        if call.broken or (call.done and not call.begun):
            _say(parts, _OPEN + call.raw)
            self._call = None
        elif call.done:
            self._call, self._closing = None, True
            self.num_calls += 1
        return self._call is None


class JsonCalls(_Calls):
    """An answer that begins with an object is calls, as long as they name tools; any other is text."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._is_text = False

    def _take(self, parts: list[Part]) -> bool:
        if self._is_text:
            if self.num_calls and not self._held.strip():  # white space after the last call is dropped
                return False
            _say(parts, self._held)
            self._held = ""
            return False
        if self._call is None:
            return self._begin()
        call = self._call
        self._held = call.feed(self._held, parts)
        if call.broken or (call.done and not call.begun):
            if call.begun:
                self.num_calls += 1
            else:
                self._held = self._opening + call.raw + self._held
            self._is_text, self._call = True, None
        elif call.done:
            self.num_calls += 1
            self._call = None
        return self._call is None

    def _begin(self) -> bool:
        rest = self._held.lstrip()
        if not self.num_calls and _PYTHON_TAG.startswith(rest[: len(_PYTHON_TAG)]) and rest:
            if len(rest) < len(_PYTHON_TAG):
                return False
            rest = rest.removeprefix(_PYTHON_TAG).lstrip()
        elif self.num_calls:
            rest = rest.removeprefix(";").lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            self._held, self._call = rest, _Call(self.num_calls, self._names)
        else:
            self._is_text = True
        return True


class MistralCalls(JsonCalls):
    """An answer that is a list of calls, as long as they name tools; any other is text. The tag before it is a special
    token, which may have been left out."""

    def _begin(self) -> bool:
        rest = self._held.lstrip()
        if self.num_calls:
            rest = rest.removeprefix(",").lstrip()
            self._opening = ""
            if not rest:
                return False
            self._is_text = not rest.startswith("{")
            self._held = rest.removeprefix("]") if self._is_text else rest
        else:
            if len(rest) < len(_TOOL_CALLS) and _TOOL_CALLS.startswith(rest):
                return False
            inside = rest.removeprefix(_TOOL_CALLS).lstrip()
            if inside == "" or inside.rstrip() == "[":
                return False
            inside = inside[1:].lstrip() if inside.startswith("[") else ""
            self._is_text = not inside.startswith("{")
            if not self._is_text:
                self._opening, self._held = self._held[: len(self._held) - len(inside)], inside
        if not self._is_text:
            self._call = _Call(self.num_calls, self._names)
        return True


class _Call:
    """One call's object, character by character. Its parts at depth 1 are keys and values; deeper, all is a value."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index = index
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._token: list[str] = []  # lists of pieces: adding to one long text again and again is quadratic
        self._name = ""
        self._arguments: list[str] = []  # parsed and not sent
        self._has_arguments = False
        self._raw: list[str] = []
        self.begun = False
        self.done = False
        self.broken = False

    def feed(self, text: str, parts: list[Part]) -> str:
        """Reads to the object's end; returns the rest."""
        taken = 0
        for char in text:
            if self.done or self.broken:
                break
            taken += 1
            self._read(char)
        if not self.begun:
            self._raw.append(text[:taken])
        if self._name and not self.begun and (self._names is None or self._name in self._names):
            self.begun = True
            parts.append(CallDelta(index=self._index, name=self._name))
        if self.begun:
            if self.done and not self._has_arguments:
                self._arguments = ["{}"]
            self.tell("".join(self._arguments), parts)
            self._arguments.clear()
        return text[taken:]

    @property
    def raw(self) -> str:
        """All that was read, up to where it begun."""
        return "".join(self._raw)

    def tell(self, arguments: str, parts: list[Part]) -> None:
        if arguments:
            parts.append(CallDelta(index=self._index, arguments=arguments))

    def _read(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif self._depth == 0:
            self._depth = int(char == "{")
            self.broken = char != "{" and not char.isspace()
        elif self._depth == 1 and char in ":,}]":
            self._divide(char)
        elif self._depth > 1 or not char.isspace():
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self._keep(char)

    def _keep(self, char: str) -> None:
        is_first, is_arguments = not self._token, self._key in _ARGUMENTS
        # Arguments written as a JSON string contain JSON themselves: sent when complete.
        if is_arguments and (char if is_first else self._token[0]) != '"':
            self._arguments.append(char)
            is_arguments = False
        if is_first or is_arguments or self._key in (None, "name"):  # other values are dropped
            self._token.append(char)

    def _divide(self, char: str) -> None:
        """The end of a key, of a value, or of all."""
        if char == ":" and self._key is None:
            self._key = _string("".join(self._token))
            self.broken = self._key is None
        elif char in ",}" and self._key is not None and self._token:
            self._set(self._key)
            self._key = None
        else:
            self.broken = char != "}" or bool(self._token)
        self.done = char == "}" and not self.broken
        self._token.clear()

    def _set(self, key: str) -> None:
        if key == "name":
            self._name = _string("".join(self._token)) or ""
            self.broken = not self._name
        elif key in _ARGUMENTS:
            self._has_arguments = True
            if self._token[0] == '"':
                text = "".join(self._token)
                held = _string(text)
                self._arguments.append(text if held is None else held)


def _say(parts: list[Part], text: str) -> None:
    if text:
        parts.append(text)


def _string(token: str) -> str | None:
    """The text of a JSON string, or None if it is no valid string. Half of a surrogate pair is not valid."""
    try:
        found = json.loads(token, strict=False)
        if isinstance(found, str):
            found.encode()
            return found
    except ValueError:
        pass
    return None


def _num_begun(text: str, tag: str) -> int:
    """How many characters at the text's end may become the tag."""
    return next(
        size for size in range(min(len(text), len(tag) - 1), -1, -1) if tag.startswith(text[len(text) - size :])
    )


def _num_open(text: str) -> int:
    """How many characters at the text's end may belong to a call that follows: the tag's, and white space before."""
    begun = _num_begun(text, _OPEN)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
