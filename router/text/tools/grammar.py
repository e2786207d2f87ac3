"""The grammar of an answer that has calls, or may have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.grammar.structure import inline_json, literal
from router.text.tools.calls import Function, ParameterType
from router.text.tools.formats import FORMATS, ToolFormat
from router.text.tools.parameter_calls import ParameterTags

_ANSWER = "<|channel|>final<|message|>"  # gpt-oss's, before a text

_ANY = "/(?s:.*)/"


def has_grammar(form: ToolFormat) -> bool:
    """False for calls as Python writes them: their arguments are no JSON."""
    return FORMATS[form].written is not None


def calls_grammar(
    form: ToolFormat,
    functions: Sequence[Function],
    *,
    parallel: bool,
    instead: str = "",
    free: bool = False,
    tokens: Mapping[str, int] | None = None,
) -> str:
    """A grammar: the answer is tool calls, or matches `instead` (the right side of a rule). With `free` it may be any
    text, but text that begins as a call must be one. `tokens`: ids of texts that are tokens; such a grammar is for
    workers, not for a check."""
    written, names = FORMATS[form].written, [f"call{number}" for number in range(len(functions))]
    assert written is not None, f"calls of {form} have no grammar"
    lark = _Marks(tokens or {})
    parallel = parallel and form not in (ToolFormat.GPT_OSS, ToolFormat.GLM4)  # whose call ends the answer
    rules = [f"named: {' | '.join(names)}", f"TEXT: {_ANY}"]
    before, more = written.before, f" ({lark(written.between)} named)*" if parallel else ""
    if form is ToolFormat.GPT_OSS:
        others = [
            f"{lark(_ANSWER)} {rule}" for rule, is_allowed in (("instead", instead), ("TEXT?", free)) if is_allowed
        ]
        rules.append(f"start: {' | '.join(['named', *others])}")
    elif not (free and written.lead):
        rules.append(f"calls: {lark(written.first)} named{more} {lark(written.last)}")
        rules.append(f"start: calls{' | instead' if instead else ''}{' | OTHER?' if free else ''}")
        rules += [f"OTHER: {written.text}"] if free else []
    elif written.lead in lark.tokens:
        if written.first:
            rules.append(f"start: TEXT? ({lark(written.first)} named{more} {lark(written.last)})? TEXT?")
        else:
            rules.append("start: (TEXT? named)* TEXT?" if parallel else "start: TEXT? (named TEXT?)?")
    else:
        # Any text, up to a call: of alternatives, what ends lazily goes first. The head has the tag and all before it.
        rules.append(f"head[lazy]: TEXT {literal(written.lead)}")
        if written.first:
            calls = f"head {lark(written.first.removeprefix(written.lead))} named{more} {lark(written.last)}"
            rules.append(f"start: {calls} | NO_CALL")
        else:
            before = before.removeprefix(written.lead)
            rules += ["call: head named", "start: call* rest" if parallel else "start: call? rest"]
            rules.append(f"rest: {'TEXT' if parallel else 'NO_CALL'}")
        rules.append(f"NO_CALL: TEXT & ~/(?s:.*){re.escape(written.lead)}(?s:.*)/")
    for name, function in zip(names, functions, strict=True):
        rules.append(f"{name}: {lark(before + function.name + written.middle)} {name}_args {lark(written.behind)}")
        rules += _arguments(form, f"{name}_args", function, lark)
    if instead:
        rules.append(f"instead: {instead}")
    return "\n".join(rules)


class _Marks:
    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._pattern = re.compile("|".join(map(re.escape, tokens)) if tokens else "(?!)")

    def __call__(self, text: str) -> str:
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            parts += [literal(text[at : match.start()])] if match.start() > at else []
            parts.append(f"<[{self.tokens[match[0]]}]>")
            at = match.end()
        return " ".join([*parts, *([literal(text[at:])] if at < len(text) else [])])


def _arguments(form: ToolFormat, name: str, function: Function, lark: _Marks) -> list[str]:
    none: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
    schema = none if function.parameters is None else {"type": "object", **function.parameters}
    tags = FORMATS[form].marks
    if not isinstance(tags, ParameterTags):
        return [f"{name}: {inline_json(schema, lenient=not function.strict)}"]
    line = "\n" if tags.is_lined else ""
    before, behind = tags.key, f"{line}{tags.close}\n"
    middle = f"{tags.key_end}\n{tags.value}" if tags.value else tags.key_end + line
    if not function.properties():
        if function.parameters is None or schema.get("additionalProperties") is False:
            return [f'{name}: ""']
        # any parameters
        lazy = f"{name}_any[lazy]: TEXT {lark(behind)}"
        return [f"{name}: ({lark(before)} {name}_KEY {lark(middle)} {name}_any)*", f'{name}_KEY: /[^<>"\\n]+/', lazy]
    required: Sequence[str] = schema.get("required") or ()
    rules, parts, types = list[str](), list[str](), function.types()
    for number, (key, property_schema) in enumerate(function.properties().items()):
        value = f"{name}_{number}"
        parts.append(value if key in required else f"{value}?")
        head = lark(before + key + middle)
        rules.append(f"{value}: {head} {value}_value")
        rules.append(_value(f"{value}_value", property_schema, types[key], function, behind, lark))
    return [f"{name}: {' '.join(parts)}", *rules]


def _value(name: str, schema: Any, kind: ParameterType, function: Function, behind: str, lark: _Marks) -> str:
    """A parameter's value and the text after it: a string as it is, anything else as JSON."""
    if kind.is_text and kind.values:
        return f"{name}: ({' | '.join(map(literal, kind.values))}) {lark(behind)}"
    if kind.is_text or not isinstance(schema, Mapping):
        return f"{name}[lazy]: TEXT {lark(behind)}"
    whole = function.parameters or {}
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    return f"{name}: {inline_json({**shared, **schema}, lenient=not function.strict)} {lark(behind)}"
