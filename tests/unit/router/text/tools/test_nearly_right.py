"""Answers that are nearly right, as models write them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from router.text.tools.calls import CallDelta, Function
from router.text.tools.formats import ToolFormat, reader_of
from router.text.tools.grammar import calls_grammar
from router.text.tools.json_repair import JsonRepair
from tests.unit.router.text.tools.test_families import SAMPLES, fits
from tests.unit.router.text.tools.test_formats import ANSWERS, read, read_pieces

HERMES, CODER, GLM, MINIMAX = ToolFormat.HERMES, ToolFormat.QWEN3_CODER, ToolFormat.GLM45, ToolFormat.MINIMAX_M2
OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
CALL: tuple[str, Any] = ("get_weather", {"city": "Oslo"})
NOW: tuple[str, Any] = ("now", {})

NEARLY: list[tuple[ToolFormat, str, str, list[tuple[str, Any]]]] = [
    (HERMES, f"<tool_call>\n{OSLO[:-1]}\n</tool_call>", "", [CALL]),
    (HERMES, f"<tool_call>\n{OSLO[:-2]}\n</tool_call>\n<tool_call>\n{OSLO}\n</tool_call>", "", [CALL, CALL]),
    (HERMES, f"<tool_call>\n{OSLO[:-2]}", "", [CALL]),
    (HERMES, f"<tool_call>\n{OSLO}}}\n</tool_call> done", " done", [CALL]),
    (HERMES, f"<tool_call>\n{{{OSLO}}}\n</tool_call>", "", [CALL]),
    (HERMES, f"<tool_call>[{OSLO}, {OSLO}]</tool_call>", "", [CALL, CALL]),
    (HERMES, f"<tool_call>\n{OSLO}\n{OSLO}\n</tool_call>", "", [CALL, CALL]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x\ny\tz"}}</tool_call>', "", [("now", {"a": "x\ny\tz"})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"x\\ny\\"}"}</tool_call>', "",
     [("now", {"a": "x\ny"})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "C:\\users\\d+"}}</tool_call>', "",
     [("now", {"a": "C:\\users\\d+"})]),
    (HERMES, "<tool_call>{'name': 'now', 'arguments': {'a': True, 'b': [1, 2,], 'c': 'say \"hi\"'}}</tool_call>", "",
     [("now", {"a": True, "b": [1, 2], "c": 'say "hi"'})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": [1, {"b": 2]}}</tool_call>', "",
     [("now", {"a": [1, {"b": 2}]})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>", "b": 1}}</tool_call>', "",
     [("now", {"a": "</tool_call>", "b": 1})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "print("hi")", "b": "<a id="c">", "d": 1}}</tool_call>', "",
     [("now", {"a": 'print("hi")', "b": '<a id="c">', "d": 1})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x = {"k": 1}"}}</tool_call>', "",
     [("now", {"a": 'x = {"k": 1}'})]),
    (HERMES, "<tool_call>{'name': 'now', 'arguments': {'a': 'It's'}}</tool_call>", "", [("now", {"a": "It's"})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 01, "b": 1., "c": [1_0, .5, -2e3], "d" "e"}}', "",
     [("now", {"a": "01", "b": "1.", "c": ["1_0", ".5", -2000.0], "d": "e"})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": []}</tool_call>', "", [NOW]),
    (HERMES, f"<tool_call>\n```json\n{OSLO}\n```\n</tool_call>", "", [CALL]),
    (HERMES, f"<tool_call>```\n[{OSLO}]```</tool_call> done", " done", [CALL]),
    (HERMES, "a <tool_call>`json` is", "a <tool_call>`json` is", []),
    (HERMES, '<tool_call>{"name": "now", "input": {"a": 1}}</tool_call>', "", [("now", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1}, "parameters": {}}</tool_call>', "",
     [("now", {"a": 1})]),
    (HERMES, f'<tool_call>{{"type": "function", "function": {OSLO}}}</tool_call>', "", [CALL]),
    (ToolFormat.MISTRAL, f"Well. [TOOL_CALLS] [{OSLO[:-1]}, {OSLO[:-1]}]", "Well.", [CALL, CALL]),
    (ToolFormat.LLAMA3_JSON, f"{OSLO}}}", "", [CALL]),
    (ToolFormat.LLAMA3_JSON, '{"type": "function", "function": "get_weather", "parameters": {"city": "Oslo"}}', "",
     [CALL]),
    (ToolFormat.GRANITE, f"<|tool_call|>[{OSLO[:-1]}", "", [CALL]),
    (ToolFormat.GRANITE, f"<|tool_call|>{OSLO}", "", [CALL]),
    (ToolFormat.MISTRAL_ARGS, '[TOOL_CALLS]now[ARGS]{"a": "x\ny"}[TOOL_CALLS]now[ARGS]null', "",
     [("now", {"a": "x\ny"}), NOW]),
    (ToolFormat.MISTRAL_ARGS, '[TOOL_CALLS]now[ARGS]{"a": "[TOOL_CALLS', "", [("now", {"a": "[TOOL_CALLS"})]),
    (ToolFormat.DEEPSEEK_V31, '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": [1}}<｜tool▁call▁end｜>', "",
     [("now", {"a": [1]})]),
    # Each of the two forms of DeepSeek's, with and without fences.
    *(
        (form, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [CALL])
        for form in (ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31)
        for call in (
            'function<｜tool▁sep｜>get_weather\n{"city": "Oslo"}\n', 'get_weather<｜tool▁sep｜>{"city": "Oslo"}',
            'function<｜tool▁sep｜>get_weather\n```\n{"city": "Oslo"}\n```',
            'get_weather\n```json\n{"city": "Oslo"}\n```',
            'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo"}\n```', 'get_weather{"city": "Oslo"}',
            'get_weather<｜tool▁sep｜>```json\n{"city": "Oslo"}\n```',
        )
    ),
    (ToolFormat.DEEPSEEK_V31, "<｜tool▁call▁begin｜>now<｜tool▁call▁end｜>", "", [NOW]),
    (ToolFormat.MISTRAL_ARGS, '[TOOL_CALLS]get_weather{"city": "Oslo"}', "", [CALL]),
    (ToolFormat.MISTRAL_ARGS, "a [TOOL_CALLS] is a token {", "a [TOOL_CALLS] is a token {", []),
    (ToolFormat.KIMI_K2, "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"
     "<|tool_call_end|><|tool_call_section_end|>", "", [NOW]),
    (ToolFormat.OLMO3, 'I look.\n<function_calls>\nget_weather(city="Oslo")\nnow()\n</function_calls>', "I look.",
     [CALL, NOW]),
    (ToolFormat.OLMO3, "<function_calls>now(a=null, b=[true])</function_calls>\n", "",
     [("now", {"a": None, "b": [True]})]),
    (ToolFormat.OLMO3, "<function_calls>mcp__fs__read-file(path='x')\nnow(a=\"it's\n2\")</function_calls>", "",
     [("mcp__fs__read-file", {"path": "x"}), ("now", {"a": "it's\n2"})]),
    (ToolFormat.OLMO3, "<function_calls> are calls", "<function_calls> are calls", []),
    (ToolFormat.GLM4, 'get_weather\n{"city": "Oslo"}', "", [CALL]),
    (ToolFormat.GLM4, 'I look.\nget_weather \n{"city": "Oslo"}\nnow\n{}', "I look.", [CALL, NOW]),
    (ToolFormat.GLM4, "\nget_weather is a\n{tool}", "\nget_weather is a\n{tool}", []),
    (ToolFormat.PYTHONIC, "Look. <|python_start|>[now()]<|python_end|>", "Look.", [NOW]),
    (ToolFormat.PHI4_MINI, f"I look. functools[{OSLO}]", "I look.", [CALL]),
    # Parameters between tags.
    (CODER, "I say <tool_call> and <function=x> now", "I say <tool_call> and <function=x> now", []),
    (CODER, "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", "", [NOW]),
    (CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=limit>\n4\n</parameter>\n"
     "</function>\n</tool_call>", "", [("get_weather", {"city": "Oslo", "limit": 4})]),
    (CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>\n<tool_call>\n"
     "<function=now>\n</function>\n</tool_call>", "", [CALL, NOW]),
    (CODER, "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>\n<tool_call>\n"
     "<function=now>\n</tool_call>", "", [CALL, NOW]),
    (CODER, "<function=get_weather>\n<parameter=city>\nOslo\n</function>\n", "", [CALL]),
    (CODER, "<function=get_weather>\n<parameter=city>\nOslo", "", [CALL]),
    (CODER, "<function=get_weather>\n<parameter=city>\nan </function> in\n<parameter=other> text\n</parameter>\n"
     "</function>", "", [("get_weather", {"city": "an </function> in", "other": "text"})]),
    (CODER, "<function=get_weather>\n<parameter=city>\nan </function> in <parameter=x> text\n</parameter>\n</function>",
     "", [("get_weather", {"city": "an </function> in <parameter=x> text"})]),
    (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n<arg_key>limit</arg_key>\n<arg_value>4\n"
     "</tool_call>", "", [("get_weather", {"city": "Oslo", "limit": 4})]),
    (GLM, "the <tool_call> and\n", "the <tool_call> and\n", []),
    (MINIMAX, '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo\n'
     '<parameter name="limit">4\n</invoke>\n</minimax:tool_call>', "", [("get_weather", {"city": "Oslo", "limit": 4})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), NEARLY)
def test_calls_that_are_nearly_right_are_read(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for size in (1, 3, 8, len(text)):
        said, written = read(form, text, size, is_whole=True)
        assert (said, [(name, json.loads(arguments)) for name, arguments in written]) == (content, calls), size


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, text, *_ in (*ANSWERS, *SAMPLES, *NEARLY)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_answer_in_two_pieces_is_the_whole_one(form: ToolFormat, text: str, is_whole: bool) -> None:
    whole = read_pieces(form, [text], is_whole=is_whole)
    for at in range(1, len(text)):
        assert read_pieces(form, [text[:at], text[at:]], is_whole=is_whole) == whole, at


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, text, *_ in (*ANSWERS, *SAMPLES, *NEARLY)])
def test_an_answer_that_ends_early_is_read_alike(form: ToolFormat, text: str) -> None:
    for end in range(len(text)):
        content, calls = read(form, text[:end], 1)
        assert (content, calls) == read(form, text[:end], end or 1)
        said, completed = read(form, text[:end], 1, is_whole=True)
        assert said == content
        assert [name for name, _ in completed] == [name for name, _ in calls]


# -- JSON --------------------------------------------------------------------------------------------------------------


def mended(text: str, size: int) -> str:
    repair, held, written = JsonRepair(), "", ""
    for at in range(0, len(text), size):
        held += text[at : at + size]
        json_text, count = repair.feed(held)
        written, held = written + json_text, held[count:]
    return written + repair.end()


def made_up(rng: random.Random, depth: int = 3) -> Any:
    match rng.randrange(8 if depth else 5):
        case 0 | 1:
            return "".join(rng.choice("ab{}[],:\"'\\\n\té😀 ") for _ in range(rng.randrange(9)))
        case 2:
            return rng.choice([0, -1, 12, 1.5, 2e-07, 10**15])
        case 3 | 4:
            return rng.choice([True, False, None])
        case 5 | 6:
            return {rng.choice("abcdef") * rng.randint(1, 3): made_up(rng, depth - 1) for _ in range(rng.randrange(4))}
        case _:
            return [made_up(rng, depth - 1) for _ in range(rng.randrange(4))]


def test_right_json_stays_as_it_is() -> None:
    rng = random.Random(7)
    for _ in range(500):
        value = {"a": made_up(rng)}
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
        assert mended(text, rng.randint(1, 9)) == text


def test_json_with_missing_or_extra_brackets_parses() -> None:
    rng = random.Random(8)
    for _ in range(500):
        text = json.dumps({"a": made_up(rng), "b": [made_up(rng)]})
        places, in_string, escaped = [], False, False
        for at, char in enumerate(text):
            if not in_string and at and char in "]},":
                places.append(at)
            in_string ^= char == '"' and not escaped
            escaped = char == "\\" and not escaped
        at = rng.choice(places)
        for wrong in (text[:at] + text[at + 1 :], text[: at + 1] + text[at:]):
            whole = mended(wrong, len(wrong))
            assert isinstance(json.loads(whole), dict), wrong
            assert mended(wrong, 1) == whole


def test_whatever_is_written_becomes_json() -> None:
    rng = random.Random(10)
    for _ in range(2000):
        text = "{" + "".join(
            rng.choice(["{", "}", "[", "]", ",", ":", '"', "'", "\\", "\n", "a", "1", "0", ".", "-", " "])
            for _ in range(12)
        )
        whole = mended(text, len(text))
        assert mended(text, 1) == whole, text
        json.loads(whole)


def test_json_as_python_writes_it_is_the_same_value() -> None:
    rng = random.Random(9)
    for _ in range(500):
        value = {"a": made_up(rng), "b": [made_up(rng)]}
        text = repr(value)
        if "\\x" not in text:
            assert json.loads(mended(text, rng.randint(1, 9))) == value


# -- types of parameters -----------------------------------------------------------------------------------------------

TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "by_ref": {"$ref": "#/$defs/Code"}, "by_chain": {"$ref": "#/$defs/Alias[int]"},
        "by_all": {"allOf": [{"$ref": "#/$defs/Code"}, {"minLength": 1}]}, "by_const": {"const": "12345"},
        "by_enum": {"enum": ["1", "2"]}, "by_any": {"anyOf": [{"$ref": "#/$defs/Code"}, {"const": "7"}]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "number": {"$ref": "#/$defs/Count"},
        "both": {"type": ["integer", "string"]}, "object": {"allOf": [{"$ref": "#/$defs/Thing"}]},
        "loop": {"$ref": "#/$defs/Loop"}, "lost": {"$ref": "#/$defs/None"},
    },
    "$defs": {
        "Code": {"type": "string"}, "Alias[int]": {"$ref": "#/$defs/Code"}, "Count": {"type": "integer"},
        "Thing": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("by_ref", "12345", "12345"),
        ("by_ref", '"12345"', '"12345"'),
        ("by_chain", "true", "true"),
        ("by_all", "12345", "12345"),
        ("by_const", "12345", "12345"),
        ("by_enum", "2", "2"),
        ("by_any", "7", "7"),
        ("maybe", "7", "7"),
        ("maybe", '"7"', "7"),
        ("maybe", "null", None),
        ("number", "7", 7),
        ("number", '"7"', 7),
        ("both", "7", 7),
        ("both", '"7"', "7"),
        ("both", "many", "many"),
        ("object", "{'a': 1, 'b': True}", {"a": 1, "b": True}),
        ("object", '"{\\"a\\": 1}"', {"a": 1}),
        ("object", '{"a": [1, 2}', {"a": [1, 2]}),
        ("loop", "7", 7),
        ("lost", "{'a': None}", {"a": None}),
        ("lost", "[see above]", "[see above]"),
        ("lost", "{'a': 1} and", "{'a': 1} and"),
    ],
)
@pytest.mark.parametrize("form", [CODER, GLM, MINIMAX])
def test_a_parameter_has_the_type_that_its_schema_allows(form: ToolFormat, name: str, written: str, value: Any) -> None:
    text = {
        CODER: f"<tool_call>\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>",
        GLM: f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
        MINIMAX: f'<minimax:tool_call><invoke name="f"><parameter name="{name}">{written}</parameter></invoke>',
    }[form]
    reader = reader_of(form, [Function(name="f", parameters=TYPED)])
    parts = [part for char in text for part in reader.feed(char)] + reader.end()
    assert json.loads("".join(part.arguments for part in parts if isinstance(part, CallDelta))) == {name: value}


def test_a_grammar_knows_the_same_types() -> None:
    strict = TYPED | {"required": ["by_ref", "by_const"], "additionalProperties": False}
    strict["properties"] = {name: TYPED["properties"][name] for name in ("by_ref", "by_const")}
    grammar = calls_grammar(CODER, [Function(name="f", parameters=strict, strict=True)], parallel=False)
    call = (
        "<tool_call>\n<function=f>\n<parameter=by_ref>\nOslo\n</parameter>\n<parameter=by_const>\n12345\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert fits(grammar, call)
    assert not fits(grammar, call.replace("12345", "6"))
