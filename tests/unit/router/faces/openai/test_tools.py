"""Tools and structured outputs through the `openai` client: what the model is shown, what it must say, what is read."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.chat_template import ChatTemplate
from router.text.model_card import ModelCard
from router.text.tools.formats import ToolFormat
from tests.unit.router.scripted import byte_level, ids_of, saying, talking, tokenizer_end

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
STRICT = [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
# Qwen's order: tools first, calls between tags, a tool's word in a user's turn.
HERMES = ChatTemplate(
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
CITY = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
NO_CITY = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)


ROOMY = ModelCard(
    name="tiny", max_model_len=4096, vocab_size=512, eos_token_ids=frozenset({tokenizer_end(byte_level())})
)
TOOLED: dict[str, Any] = {"template": HERMES, "tool_format": ToolFormat.HERMES}


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
    return await client.chat.completions.create(**(asked | options))


def fits(grammar: str, text: str) -> bool:
    """Does the grammar take the text, and may it end there?"""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


async def test_calls_are_read_and_a_streams_deltas_join_to_them() -> None:
    async with talking(saying(CALLS, at_once=3), card=ROOMY, **TOOLED) as (client, generate):
        whole = await ask(client, tools=[WEATHER, NOW])
        asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [WEATHER, NOW]}
        async with client.chat.completions.stream(**asked) as events:
            kinds = [event.type async for event in events]
            joined = (await events.get_final_completion()).choices[0]
    [choice] = whole.choices
    assert choice.finish_reason == joined.finish_reason == "tool_calls"
    assert choice.message.content == joined.message.content == "Let me look."
    for calls in (choice.message.tool_calls, joined.message.tool_calls):
        assert calls is not None
        assert [(call.type, call.function.name) for call in calls] == [("function", "weather"), ("function", "now")]
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": 'Paris "x"'}, {}]
        assert len({call.id for call in calls}) == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 3, "arguments come in pieces"
    assert generate.jobs[0].sampling.grammar == ""


async def test_the_model_sees_tools_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    wrong = {"role": "assistant", "tool_calls": [call | {"function": {"name": "weather", "arguments": "{"}}]}
    async with talking(card=ROOMY, **TOOLED) as (client, generate):
        await ask(client, messages=turns, tools=[NOW])
        await ask(client, messages=turns, tools=[NOW], tool_choice="none")
        await ask(client, messages=[*HELLO, wrong])
    shown, hidden, broken = [byte_level().decode(job.prompt_ids) for job in generate.jobs]
    assert '"name": "now"' in shown
    assert 'weather({"city": "Oslo"})' in shown
    assert shown.endswith("tool: 7")
    assert '"name": "now"' not in hidden
    assert broken.endswith('weather("{")'), "a model's own words, which it is to see again"


def allowed(mode: str) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "now"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"tool_choice": "required"}, [f"{CITY}\n{CITY}", NO_CITY], ["Hello", f"{CITY} ", ""]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CITY], [f"{CITY}\n{CITY}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, [CITY], [NO_CITY, f"{CITY}\n{CITY}"]),
        ({"response_format": {"type": "json_object"}}, ["{}", CITY], ["[1]", "Hello"]),
        (
            {"tools": STRICT},
            ["Hello {", f"Well,\n{CITY}", f"{CITY} and\n{CITY} <"],
            ["<tool_call>no", f"{CITY}<tool_call>{{"],
        ),
        (
            {"tools": STRICT, "parallel_tool_calls": False},
            ["Hello", f"Well,\n{CITY}", f"{CITY} and <tool"],
            ["<tool_call>\n{}", f"{CITY}\n{CITY}"],
        ),
        (
            {"parallel_tool_calls": False},
            ["Hello", f"Well,\n{CITY}", CITY.replace('"city"', '"town"')],
            [f"{CITY}\n{CITY}", CITY.replace("weather", "then")],
        ),
        ({"tool_choice": allowed("auto")}, ["Hello", f"{NO_CITY}\n{NO_CITY}"], [CITY]),
        ({"tool_choice": allowed("required")}, [NO_CITY], ["Hello", CITY]),
    ],
)
async def test_a_choice_of_tools_binds_the_answer(options: dict[str, Any], good: list[str], bad: list[str]) -> None:
    async with talking(saying(CITY), card=ROOMY, **TOOLED) as (client, generate):
        [choice] = (await ask(client, **({"tools": [WEATHER, NOW]} | options))).choices
    is_named = isinstance(options.get("tool_choice"), dict) and options["tool_choice"]["type"] == "function"
    assert (choice.finish_reason, choice.message.content) == ("stop" if is_named else "tool_calls", None)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    [job] = generate.jobs
    assert [text for text in good if not fits(job.sampling.grammar, text)] == []
    assert [text for text in bad if fits(job.sampling.grammar, text)] == []


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"response_format": {"type": "text"}}, [], []),
        ({"response_format": {"type": "json_object"}}, ["{}", '{ "a":\n [1]}'], ["[]", "{"]),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            ['{"city": "é"}', '{\n  "city": ""\n}'],
            ["{}", '{"city": 1}', '{"city":  ""}'],
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a/b+"}}}, ["a/bb"], ["a/", "xa/b"]),
        ({"extra_body": {"structured_outputs": {"choice": ['y"es', "no"]}}}, ['y"es', "no"], ["yes"]),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, ['{"city":""}'], ["{}"]),
        ({"extra_body": {"structured_outputs": {"json": json.dumps(SCHEMA)}}}, ['{ "city":""}'], ["{}"]),
        (
            {"extra_body": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}},
            ['{"city":" a"}'],
            ['{"city": ""}', '{\n"city":""}'],
        ),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a" /[0-9]+/'}}}, ["a7"], ["a"]),
        (
            {"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" digit+\n  | "b" # or\ndigit ::= [0-9]'}}},
            ["a7", "a77", "b"],
            ["a", "bb", "ab"],
        ),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, ['{"city":1}'], ["1", "[]"]),
        ({"extra_body": {"structured_outputs": {"json_object": False, "regex": "a+"}}}, ["aa"], ["{}"]),
    ],
)
async def test_an_answers_form_reaches_the_workers(options: dict[str, Any], good: list[str], bad: list[str]) -> None:
    async with talking() as (client, generate):
        await ask(client, **options)
        if "extra_body" in options:
            await client.completions.create(model="tiny", prompt="x", **options)
    grammars = {job.sampling.grammar for job in generate.jobs}
    [grammar] = grammars
    assert bool(grammar) == bool(good)
    assert [text for text in good if not fits(grammar, text)] == []
    assert [text for text in bad if fits(grammar, text)] == []


def schema(content: Any, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content} | changes}


AT = {"type": "object", "properties": {"at": {"not": {}}}}
STRICT_NOT = {"type": "function", "function": {"name": "save", "strict": True, "parameters": AT}}

TEXT_TOOL = {"type": "function", "function": {"name": "say", "parameters": {"type": "string"}}}


@pytest.mark.parametrize(
    ("options", "param", "told"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing required"),
        ({"response_format": schema({"type": "thing"})}, "response_format", "thing"),
        ({"response_format": schema({"not": {}})}, "response_format", 'not.*"strict": false'),
        ({"tools": [NOW, STRICT_NOT], "tool_choice": "required"}, "tools", "not"),
        ({"response_format": schema({"$ref": "http://x/y"})}, "response_format", "cannot be enforced"),
        ({"response_format": schema({"enum": ["x" * 140_000]})}, "response_format", "at most 131072 are read"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "leave one of them out"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {}}, "structured_outputs", "give exactly one"),
        ({"structured_outputs": {"json": "{city"}}, "structured_outputs.json", "not JSON: .*or its text"),
        ({"structured_outputs": {"json": '"city"'}}, "structured_outputs.json", "must be a JSON Schema.*or its text"),
        ({"structured_outputs": {"json": json.dumps(DEEP)}}, "structured_outputs.json", "nested too deeply"),
        ({"response_format": schema(json.dumps(SCHEMA))}, "response_format.json_schema.schema", "must be .* object"),
        ({"guided_json": SCHEMA}, "guided_json", 'structured_outputs\' now: {"json": ...}'),
        ({"response_format": schema(DEEP)}, "response_format.json_schema.schema", "nested too deeply.*at most 64"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice", "are weather"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {"regex": "a"}, "tools": [NOW]}, "structured_outputs", "exclude each other"),
        ({"tools": [NOW, NOW]}, "tools", "two functions of one name"),
        ({"tools": [TEXT_TOOL]}, "tools[0].function.parameters", "a JSON Schema whose type is object"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice", "are now"),
    ],
)
async def test_impossible_combinations_are_refused(options: dict[str, Any], param: str, told: str) -> None:
    async with talking(card=ROOMY, **TOOLED) as (client, generate):
        with pytest.raises(openai.BadRequestError, match=told) as refused:
            await ask(client, extra_body=options)
    assert refused.value.param == param
    assert not generate.jobs


async def test_a_lenient_schema_skips_unenforceable_parts() -> None:
    async with talking() as (client, generate):
        await ask(client, response_format=schema({"type": "object", "not": {}}, strict=False))
    assert fits(generate.jobs[0].sampling.grammar, "{}")


async def test_an_operator_may_forbid_whitespace() -> None:
    spaced, dense = '{"city": ""}', '{"city":""}'
    async with talking(disable_any_whitespace=True) as (client, generate):
        await ask(client, response_format=schema(SCHEMA))
        for said in ({}, {"disable_any_whitespace": False}):
            await ask(client, extra_body={"structured_outputs": {"json": SCHEMA} | said})
    told = [(fits(job.sampling.grammar, dense), fits(job.sampling.grammar, spaced)) for job in generate.jobs]
    assert told == [(True, False), (True, False), (True, True)]


async def test_a_required_call_cut_before_its_name_is_no_text() -> None:
    begun = '<tool_call>\n{"name": "weather'
    cut = len(ids_of(begun))
    async with talking(saying(CITY), **TOOLED) as (client, _):
        for tool_choice, content in (("required", None), ("auto", begun)):
            whole = await ask(client, tools=[WEATHER, NOW], tool_choice=tool_choice, max_tokens=cut)
            [answer] = whole.choices
            assert (answer.message.content or None, answer.finish_reason) == (content, "length")


async def test_calls_that_nobody_can_read_are_refused() -> None:
    """The template shows tools, and does not tell how they are called."""
    async with talking(template=HERMES) as (client, _):
        with pytest.raises(openai.BadRequestError, match="--tool-parser"):
            await ask(client, tools=[NOW])
