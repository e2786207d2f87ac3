"""One answer in the format of each family of models, in pieces of any size: written for these tests after the families'
chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.reasoning import ARGUMENTS, CALL, CALL_END
from router.text.tools.calls import CallDelta, Function
from router.text.tools.formats import ToolFormat, reader_of
from router.text.tools.grammar import calls_grammar
from tests.unit.router.text.tools.test_formats import FUNCTIONS, read

CITY: dict[str, Any] = {"city": 'Pa "r" is\n\\ é', "days": [1, {"a": None}]}
TEXT = json.dumps(CITY, ensure_ascii=False)
WEATHER: list[tuple[str, Any]] = [("get_weather", CITY)]
BOTH = [*WEATHER, ("now", {})]
_D = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

SAMPLES: list[tuple[ToolFormat, str, str, list[tuple[str, Any]]]] = [
    (
        ToolFormat.QWEN3_CODER,
        f"I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY['city']}\n</parameter>\n"
        '<parameter=days>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n",
        "I look.",
        BOTH,
    ),
    (
        ToolFormat.QWEN3_CODER,
        "<function=get_weather>\n<parameter=city>\n42\n</parameter>\n<parameter=limit>\n5\n</parameter>\n"
        "<parameter=other>\nTrue\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>",
        "",
        [("get_weather", {"city": "42", "limit": 5, "other": True, "unit": "C"})],
    ),
    (
        ToolFormat.GLM45,
        f"\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY['city']}</arg_value>\n"
        '<arg_key>days</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        "\nI look.",
        BOTH,
    ),
    (
        ToolFormat.GLM45,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>limit</arg_key>"
        "<arg_value>many</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [("get_weather", {"city": "Oslo", "limit": "many"}), ("now", {})],
    ),
    (
        ToolFormat.MINIMAX_M2,
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        f'<parameter name="city">{CITY["city"]}</parameter>\n'
        '<parameter name="days">[1, {"a": null}]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "I look.",
        BOTH,
    ),
    (ToolFormat.MISTRAL_ARGS, f"I look.[TOOL_CALLS]get_weather[ARGS]{TEXT}[TOOL_CALLS]now[ARGS]{{}}", "I look.", BOTH),
    (ToolFormat.MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{TEXT}", "", WEATHER),
    (
        ToolFormat.GRANITE,
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {TEXT}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        BOTH,
    ),
    (
        ToolFormat.PHI4_MINI,
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {TEXT}}}]<|/tool_call|>',
        "",
        WEATHER,
    ),
    (ToolFormat.PHI4_MINI, f'functools[{{"name": "get_weather", "arguments": {TEXT}}}]', "", WEATHER),
    (
        ToolFormat.COMMAND_R,
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {TEXT}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        BOTH,
    ),
    (
        ToolFormat.DEEPSEEK_V3,
        f"I look.{_D[0]}{_D[1]}function{_D[2]}get_weather\n```json\n{TEXT}\n```{_D[3]}\n"
        f"{_D[1]}function{_D[2]}now\n```json\n{{}}\n```{_D[3]}{_D[4]}",
        "I look.",
        BOTH,
    ),
    (
        ToolFormat.DEEPSEEK_V31,
        f"I look.{_D[0]}{_D[1]}get_weather{_D[2]}{TEXT}{_D[3]}{_D[1]}now{_D[2]}{{}}{_D[3]}{_D[4]}",
        "I look.",
        BOTH,
    ),
    (
        ToolFormat.KIMI_K2,
        f"I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{TEXT}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        BOTH,
    ),
    (ToolFormat.GPT_OSS, f"I look.{CALL}get_weather{ARGUMENTS}{TEXT}{CALL_END}", "I look.", WEATHER),
    (ToolFormat.GPT_OSS, f"{CALL}now{ARGUMENTS}", "", [("now", {})]),
    (
        ToolFormat.PYTHONIC,
        f"[get_weather(city={CITY['city']!r}, days=[1, {{'a': None}}]), now()]",
        "",
        BOTH,
    ),
    (ToolFormat.PYTHONIC, '<|python_start|>[get_weather(city="a)]", days=null)]<|python_end|>', "",
     [("get_weather", {"city": "a)]", "days": None})]),
    (ToolFormat.LLAMA3_JSON, f'<|python_start|>{{"name": "get_weather", "parameters": {TEXT}}}', "", WEATHER),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), SAMPLES)
def test_calls_of_each_family_are_read(form: ToolFormat, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for size in (1, 3, 8, len(text)):
        found, written = read(form, text, size)
        assert (found, [(name, json.loads(arguments)) for name, arguments in written]) == (content, calls), size


@pytest.mark.parametrize("text", ["[f(1)] is how you call f", "[x(y) for y in z]", "[f(a=1", " [f(a=1 + 2"])
def test_a_python_list_that_is_no_call_stays_text(text: str) -> None:
    """Its first bracket was lost."""
    for size in (1, 5, len(text)):
        assert read(ToolFormat.PYTHONIC, text, size) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.MISTRAL_ARGS, '[TOOL_CALLS][ARGS]{"a": 1}'),
        (ToolFormat.GLM45, "<tool_call> \n"),
        (ToolFormat.DEEPSEEK_V31, f"{_D[1]}{_D[2]}"),
        (ToolFormat.KIMI_K2, "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>"),
    ],
)
def test_a_call_without_a_name_is_text(form: ToolFormat, text: str) -> None:
    for size in (1, 5, len(text)):
        content, calls = read(form, text, size)
        assert calls == []
        assert text.strip().startswith(content.strip()[:6])
        assert content.strip()


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("text", ["just text, with <, [ and {\n", "the <tool_ and <| end", "[1, 2] (a)", " "])
def test_text_that_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    for size in (1, 5, len(text)):
        assert read(form, text, size) == (text, [])


def test_text_of_a_parameter_is_sent_while_it_comes() -> None:
    reader = reader_of(ToolFormat.QWEN3_CODER, FUNCTIONS)
    assert reader.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n") == [
        CallDelta(index=0, name="get_weather"), CallDelta(index=0, arguments='{"city": "'),
    ]  # fmt: skip
    assert reader.feed('New "Y') == [CallDelta(index=0, arguments='New \\"Y')]
    assert reader.feed("ork\n</para") == [CallDelta(index=0, arguments="ork")]
    reader.feed("meter>\n</function>")
    assert reader.num_calls == 1


def test_a_call_cut_off_keeps_its_text() -> None:
    for form, text in (
        (ToolFormat.QWEN3_CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs"),
        (ToolFormat.GLM45, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os"),
        (ToolFormat.MINIMAX_M2, '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Os'),
        (ToolFormat.DEEPSEEK_V31, f'{_D[1]}get_weather{_D[2]}{{"city": "Os'),
        (ToolFormat.GRANITE, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Os'),
    ):
        content, [(name, arguments)] = read(form, text, 4)
        assert (content, name) == ("", "get_weather")
        assert arguments.startswith('{"city": "Os')


# -- grammars ----------------------------------------------------------------------------------------------------------

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "limit": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FITTING = {
    ToolFormat.QWEN3_CODER: "<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n<parameter=limit>\n5\n"
    "</parameter>\n</function>\n</tool_call>",
    ToolFormat.GLM45: "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>limit</arg_key>\n"
    "<arg_value>5</arg_value>\n</tool_call>",
    ToolFormat.MINIMAX_M2: '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="limit">5</parameter>\n</invoke>\n</minimax:tool_call>',
    ToolFormat.MISTRAL_ARGS: '[TOOL_CALLS]f[ARGS]{"city": "Oslo", "limit": 5}',
    ToolFormat.GRANITE: '<|tool_call|>[{"name": "f", "arguments": {"city": "Oslo", "limit": 5}}]',
    ToolFormat.PHI4_MINI: '<|tool_call|>[{"name": "f", "arguments": {"city": "Oslo", "limit": 5}}]<|/tool_call|>',
    ToolFormat.COMMAND_R: '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {'
    '"city": "Oslo", "limit": 5}}\n]<|END_ACTION|>',
    ToolFormat.DEEPSEEK_V3: f'{_D[0]}{_D[1]}function{_D[2]}f\n```json\n{{"city": "Oslo", "limit": 5}}'
    f"\n```{_D[3]}{_D[4]}",
    ToolFormat.DEEPSEEK_V31: f'{_D[0]}{_D[1]}f{_D[2]}{{"city": "Oslo", "limit": 5}}{_D[3]}{_D[4]}',
    ToolFormat.KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "limit": 5}<|tool_call_end|><|tool_calls_section_end|>',
    ToolFormat.GPT_OSS: '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Oslo", "limit": 5}',
}


def fits(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize("form", FITTING)
def test_a_grammar_binds_calls_of_each_family(form: ToolFormat) -> None:
    functions = [Function(name="f", parameters=STRICT, strict=True), Function(name="g")]
    call = FITTING[form]
    wrong = call.replace("5", '"x"')
    required = calls_grammar(form, functions, parallel=True)
    assert fits(required, call)
    assert not fits(required, wrong)
    assert not fits(required, "Hello.")
    free = calls_grammar(form, functions, parallel=False, free=True)
    final = "<|channel|>final<|message|>" if form is ToolFormat.GPT_OSS else ""
    assert fits(free, f"{final}Hello, [1] and <b>.")
    assert fits(free, call if final else f"I look.{call}")
    assert not fits(free, wrong if final else f"I look.{wrong}")
    other = calls_grammar(form, functions, parallel=True, instead='%json {"type": "integer"}')
    assert fits(other, call)
    assert fits(other, f"{final}7")


def test_tags_that_are_tokens_have_their_numbers() -> None:
    tokens = {"[TOOL_CALLS]": 300, "[ARGS]": 301}
    grammar = calls_grammar(ToolFormat.MISTRAL_ARGS, [Function(name="f")], parallel=True, free=True, tokens=tokens)
    assert "start: (TEXT? named)* TEXT?" in grammar
    assert '<[300]> "f" <[301]>' in grammar
    assert "TOOL_CALLS" not in grammar
