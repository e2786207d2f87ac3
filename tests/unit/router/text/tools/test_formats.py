"""Calls of tools, read from answers that come in pieces of any size."""

from __future__ import annotations

import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.tools.calls import CallDelta, Function, Part
from router.text.tools.formats import ToolFormat, format_of, new_call_id, reader_of
from router.text.tools.grammar import calls_grammar, has_grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "array"}, "unit": {"enum": ["C", "F"]},
        "limit": {"type": ["integer", "string"]}, "other": {},
    },
    "required": ["city"],
}  # fmt: skip
FUNCTIONS = [Function(name="get_weather", parameters=SCHEMA), Function(name="now")]
PARIS, NOW = '{"city": "Pa\\"r}is", "days": [1, {"a": 2}]}', "{}"
HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL


def read(form: ToolFormat, text: str, size: int, *, is_whole: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text and calls of an answer; it was cut off unless `is_whole`."""
    return read_pieces(form, [text[at : at + size] for at in range(0, len(text), size)], is_whole=is_whole)


def read_pieces(form: ToolFormat, pieces: list[str], *, is_whole: bool) -> tuple[str, list[tuple[str, str]]]:
    reader = reader_of(form, FUNCTIONS)
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.feed(piece)
    parts += reader.end(is_whole=is_whole)
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallDelta):
            if part.name:
                assert part.index == len(calls), "calls are numbered as they begin"
                calls.append((part.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + part.arguments)
    return "".join(part for part in parts if isinstance(part, str)), calls


WEATHER = ("get_weather", PARIS)
ANSWERS: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "just text,  with < and <tool and \n", "just text,  with < and <tool and \n", []),
    (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', "", [WEATHER]),
    (
        HERMES,
        f'Let me see.\n\n<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [WEATHER, ("now", NOW)],
    ),
    (HERMES, '<tool_call>{"name": "now"}</tool_call> done', " done", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "\\ud83d"}</tool_call>', "", [("now", '"\\ud83d"')]),
    (HERMES, '<tool_call>{"name": "\\ud83d"}</tool_call>', '<tool_call>{"name": "\\ud83d"}</tool_call>', []),
    (HERMES, "<tool_call>no object</tool_call>", "<tool_call>no object</tool_call>", []),
    (HERMES, '<tool_call>{"nome": 1}</tool_call>', '<tool_call>{"nome": 1}</tool_call>', []),
    (HERMES, '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": [1', "", [("now", '{"a": [')]),
    (HERMES, '<tool_call>{"name": "now"} <tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")] * 2),
    (LLAMA, f' {{"name": "get_weather", "parameters": {PARIS}}}', "", [WEATHER]),
    (LLAMA, f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}', "", [WEATHER]),
    (LLAMA, '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}} ', "", [("now", "{}")] * 2),
    (LLAMA, 'Here: {"name": "now", "parameters": {}}', 'Here: {"name": "now", "parameters": {}}', []),
    (LLAMA, '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', []),
    (LLAMA, '{"answer": 1} of 2', '{"answer": 1} of 2', []),
    (LLAMA, " \n", " \n", []),
    (LLAMA, "<|py is text", "<|py is text", []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "", [WEATHER]),
    (
        MISTRAL,
        f' [{{"name": "now", "arguments": {{}}}}, {{"name": "get_weather", "arguments": {PARIS}}} ] ',
        "",
        [("now", NOW), WEATHER],
    ),
    (MISTRAL, '[TOOL_CALLS] [ {"name": "now"}]', "", [("now", "{}")]),
    (MISTRAL, '[ {"name": "Ann", "age": 7}]', '[ {"name": "Ann", "age": 7}]', []),
    (MISTRAL, "[TOOL_CALLS]no list", "[TOOL_CALLS]no list", []),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
    (MISTRAL, "[TOOL is text", "[TOOL is text", []),
    (MISTRAL, 'Look: [{"name": "now"}]', 'Look: [{"name": "now"}]', []),
    (MISTRAL, f'Look.\n[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "Look.", [WEATHER]),
    (MISTRAL, f'Look. [TOOL_CALLS]{{"name": "get_weather", "arguments": {PARIS}}} [{{', "Look. [{", [WEATHER]),
    (MISTRAL, "Write [TOOL_CALLS] [1]", "Write [TOOL_CALLS] [1]", []),
    (LLAMA, 'Look. <|python_tag|>{"name": "now", "parameters": {}}', "Look.", [("now", "{}")]),
    (MISTRAL, '[{"nam', '[{"nam', []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_calls_are_read_whatever_the_pieces(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        assert read(form, text, size) == (content, calls)


@pytest.mark.parametrize(
    ("form", "begun"),
    [
        (HERMES, '<tool_call>{"name": "now", "arguments": '),
        (LLAMA, '{"other": '),
        (ToolFormat.QWEN3_CODER, "<function=now><parameter=a>"),
        (ToolFormat.MISTRAL_ARGS, '[TOOL_CALLS]now[ARGS]{"a": '),
    ],
)
@pytest.mark.parametrize("size", [4, 10**9])
def test_long_arguments_cost_linear_time(form: ToolFormat, begun: str, size: int) -> None:
    """Seconds; their square would be beyond the test's own limit."""
    reader, text = reader_of(form, FUNCTIONS), begun + '["' + "x" * 2_000_000 + '"]}'
    parts = [part for at in range(0, len(text), size) for part in reader.feed(text[at : at + size])] + reader.end()
    assert sum(len(part if isinstance(part, str) else part.arguments) for part in parts) > 2_000_000


def test_arguments_are_told_while_they_come() -> None:
    reader = reader_of(HERMES, FUNCTIONS)
    assert reader.feed('<tool_call>{"name": "now"') == []
    assert reader.feed(', "arguments": {"a"') == [CallDelta(index=0, name="now"), CallDelta(index=0, arguments='{"a')]
    assert reader.feed(': "1') == [CallDelta(index=0, arguments='": "1')]
    assert reader.feed('"}}') == [CallDelta(index=0, arguments='"}')]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>\\n' }}", HERMES),
        ('Respond in the format {"name": function name, "parameters": dictionary}.', LLAMA),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", ToolFormat.MISTRAL_ARGS),
        ("{{ '<tool_call>\\n<function=' + name }}", ToolFormat.QWEN3_CODER),
        ("{{ '<tool_call>' + name + '\\n<arg_key>' }}", ToolFormat.GLM45),
        ("{{ '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '```json' }}", ToolFormat.DEEPSEEK_V3),
        ("{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", ToolFormat.DEEPSEEK_V31),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", ToolFormat.KIMI_K2),
        ("<|START_ACTION|>[", ToolFormat.COMMAND_R),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", ToolFormat.PHI4_MINI),
        ("in the form functools[{name, arguments}]", ToolFormat.PHI4_MINI),
        ("begin with <|tool_call|> and a list", ToolFormat.GRANITE),
        ("{{ 'to=functions.' + name }}", ToolFormat.GPT_OSS),
        ("Use [func_name1(param1=value1)]", ToolFormat.PYTHONIC),
        ("{{ messages }}", None),
    ],
)
def test_a_template_tells_the_format(template: str, form: ToolFormat | None) -> None:
    assert format_of(template) == form


@pytest.mark.parametrize("form", [form for form in ToolFormat if has_grammar(form)])
@pytest.mark.parametrize("parallel", [False, True])
def test_grammars_of_calls_compile(form: ToolFormat, parallel: bool) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"type": "null"}},
    }
    functions = [Function(name="f", parameters=schema, strict=True), Function(name="g.h-1")]
    for options in ({}, {"instead": '%json {"type": "object"}'}, {"free": True}):
        grammar = calls_grammar(form, functions, parallel=parallel, **options)
        assert LLMatcher.validate_grammar(grammar) == ""


def test_mistrals_templates_take_their_calls_back() -> None:
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", new_call_id(MISTRAL)) for _ in range(9))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        (" Hi { there", True),
        ('{"name": "now", "parameters": {"a": 1}}', True),
        ('{"name": "now", "parameters": {"a": "b"}}', False),
        (' {"name": 1}', False),
        ("{", False),
    ],
)
def test_llamas_text_and_calls_are_told_apart_by_their_beginning(text: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    grammar = calls_grammar(LLAMA, [Function(name="now", parameters=schema)], parallel=True, free=True)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == fits


@pytest.mark.parametrize(("arguments", "fits"), [('{"a": 1}', True), ('"a"', False), ("[]", False), ("null", False)])
def test_arguments_without_a_schema_are_an_object(arguments: str, fits: bool) -> None:
    grammar = calls_grammar(HERMES, [Function(name="now", parameters={})], parallel=True)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    call = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
    assert (matcher.consume_tokens(list(call.encode())) and matcher.is_accepting()) == fits
