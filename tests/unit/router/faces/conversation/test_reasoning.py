"""Reasoning through every API: streamed, whole, written by sinks, switched on and off, and before a bound answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.streaming.token_sink import compiled
from tests.unit.router.reasoning_model import ALWAYS, HARMONY, HYBRID, MISTRAL, OPENED, Worker, reasoning_model, tagged
from tests.unit.router.scripted import ids_of, make_gateway, serving, with_card
from workers.grammar.guidance import without_specials

SAID = "<think>\nthe quick <brown> fox\n</think>\n\nthe lazy dog"
THOUGHT, ANSWER = "the quick <brown> fox\n", "the lazy dog"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: HELLO | {"stream_options": {"include_usage": True}},
    MESSAGES: HELLO | {"max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    RESPONSES: {"model": "tiny", "input": "hello", "reasoning": {"effort": "high"}},
    OLLAMA: HELLO | {"think": True},
}


@asynccontextmanager
async def asking(text: str = SAID, template: str = HYBRID, name: str = "qwen3") -> AsyncIterator[Any]:
    worker = Worker(text)
    gateway = make_gateway(worker, **reasoning_model(template, name))
    ends = frozenset(ids_of("<|return|>", tagged())) if name == "gpt_oss" else gateway.card.eos_token_ids
    async with (
        serving(with_card(gateway, max_model_len=4096, eos_token_ids=ends)) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=60) as http,
    ):
        yield http, worker


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    blocks = [line for line in answer.text.replace("\r", "").split("\n") if line and not line.startswith("event:")]
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks if not block.endswith("[DONE]")]


def joined(path: str, events: list[dict[str, Any]]) -> tuple[str, str, int]:
    """Reasoning, answer and reasoning tokens of a stream."""
    match path:
        case "/v1/chat/completions":
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
            assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
            thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
            usage = events[-1]["usage"]["completion_tokens_details"]
            return thoughts, "".join(delta.get("content", "") for delta in deltas), usage["reasoning_tokens"]
        case "/v1/messages":
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
            places = [event["index"] for event in events if event["type"] == "content_block_delta"]
            assert (kinds, places) == (["thinking", "text"][-len(kinds) :], sorted(places))
            assert len([delta for delta in deltas if delta.get("signature")]) == kinds.count("thinking")
            thoughts = "".join(delta.get("thinking", "") for delta in deltas)
            usage = events[-2]["usage"]["output_tokens_details"]
            return thoughts, "".join(delta.get("text", "") for delta in deltas), usage["thinking_tokens"]
        case "/v1/responses":
            response = events[-1]["response"]
            texts = {event["type"]: event["content"][0]["text"] for event in response["output"]}
            for kind in ("reasoning_text", "output_text"):
                deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
                assert "".join(deltas) in texts.values()
            usage = response["usage"]["output_tokens_details"]
            return texts.get("reasoning", ""), texts["message"], usage["reasoning_tokens"]
        case _:
            thoughts = "".join(event["message"].get("thinking", "") for event in events)
            return thoughts, "".join(event["message"]["content"] for event in events), -1


def parts_of(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and answer of a whole answer."""
    match path:
        case "/v1/chat/completions":
            message = body["choices"][0]["message"]
            assert message.get("reasoning") == message.get("reasoning_content")
            return message.get("reasoning_content", ""), message["content"]
        case "/v1/messages":
            parts = {event["type"]: event.get("thinking", event.get("text")) for event in body["content"]}
            return parts.get("thinking", ""), parts["text"]
        case "/v1/responses":
            parts = {event["type"]: event["content"][0]["text"] for event in body["output"]}
            return parts.get("reasoning", ""), parts["message"]
        case _:
            return body["message"].get("thinking", ""), body["message"]["content"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("template", [HYBRID, OPENED, HARMONY])
async def test_reasoning_is_apart_from_the_answer_streamed_and_whole(path: str, template: str) -> None:
    said, name = SAID if template == HYBRID else SAID.removeprefix("<think>\n"), "qwen3"
    if template == HARMONY:
        name = "gpt_oss"
        said = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}"
    async with asking(said, template, name) as (http, worker):
        streamed = await http.post(path, json=ASKED[path] | {"stream": True})
        num_written = worker.num_taken
        asked = {name: value for name, value in ASKED[path].items() if name != "stream_options"}
        whole = await http.post(path, json=asked | {"stream": False})
    assert (streamed.status_code, whole.status_code) == (200, 200), whole.text
    thoughts, answer, num_thoughts = joined(path, events_of(streamed))
    assert (thoughts, answer) == parts_of(path, whole.json()) == (THOUGHT, ANSWER)
    if path != OLLAMA:
        assert num_thoughts == len(ids_of(THOUGHT, tagged())) + (template == HYBRID)
    if compiled() is not None and path != RESPONSES:  # whose events are numbered
        assert num_written > len(ids_of(ANSWER, tagged())), "compiled code writes reasoning, too"


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {"include_reasoning": False}),
        (MESSAGES, {"thinking": {"type": "enabled", "display": "omitted"}}),
        (MESSAGES, {"thinking": None}),
        (OLLAMA, {"think": False}),
    ],
)
async def test_reasoning_that_is_not_wanted_is_left_out_and_counted(path: str, changes: dict[str, Any]) -> None:
    async with asking(template=ALWAYS) as (http, _):
        streamed = events_of(await http.post(path, json=ASKED[path] | changes | {"stream": True}))
    thoughts, answer, num_thoughts = joined(path, streamed)
    assert (thoughts, answer) == ("", ANSWER)
    assert num_thoughts > 5 or path == OLLAMA


@pytest.mark.parametrize(
    ("path", "changes", "is_closed"),
    [
        (CHAT, {}, False),
        (CHAT, {"reasoning_effort": "none"}, True),
        (CHAT, {"reasoning_effort": "high"}, False),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, True),
        (MESSAGES, {"thinking": None}, True),
        (MESSAGES, {"thinking": {"type": "disabled"}}, True),
        (MESSAGES, {}, False),
        (RESPONSES, {"reasoning": {"effort": "none"}}, True),
        (RESPONSES, {"reasoning": None}, False),
        (OLLAMA, {"think": False}, True),
        (OLLAMA, {"think": None}, False),
    ],
)
async def test_a_request_switches_reasoning_where_the_template_can(
    path: str, changes: dict[str, Any], is_closed: bool
) -> None:
    async with asking(" the dog") as (http, worker):
        answer = await http.post(path, json=ASKED[path] | changes | {"stream": False, "stream_options": None})
        assert answer.status_code == 200, answer.text
    assert tagged().decode(worker.jobs[0].prompt_ids).endswith("</think>\n\n") is is_closed
    assert parts_of(path, answer.json()) == ("", " the dog")


async def test_an_effort_needs_a_template_with_one() -> None:
    plain = "{% for m in messages %}{{ m.content }}</think>{% endfor %}"
    async with asking("x", HARMONY, "gpt_oss") as (http, worker):
        await http.post(CHAT, json=HELLO | {"reasoning_effort": "low"})
        await http.post(RESPONSES, json=ASKED[RESPONSES])
    assert ["low" in tagged().decode(worker.jobs[0].prompt_ids), "high" in tagged().decode(worker.jobs[1].prompt_ids)]
    async with asking("x", plain) as (http, _):
        refused = await http.post(CHAT, json=HELLO | {"reasoning_effort": "low"})
        listed = await http.post(RESPONSES, json=ASKED[RESPONSES])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")
    assert listed.headers["x-baton-ignored"] == "reasoning.effort"


async def test_stop_strings_apply_to_the_answer_only() -> None:
    async with asking() as (http, _):
        chat = (await http.post(CHAT, json=HELLO | {"stop": ["brown", " dog"]})).json()
        text = (await http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 99})).json()
    assert parts_of(CHAT, chat) == (THOUGHT, "the lazy")
    assert text["choices"][0]["text"] == SAID


async def test_reasoning_has_the_templates_field_name() -> None:
    said = {"role": "assistant", "content": "x", "reasoning_content": "deep"}
    async with asking("x", HARMONY, "gpt_oss") as (http, worker):
        await http.post(CHAT, json=HELLO | {"messages": [*HELLO["messages"], said, *HELLO["messages"]]})
    assert "<|channel|>analysis<|message|>deep" in tagged().decode(worker.jobs[0].prompt_ids)


# -- calls inside reasoning --------------------------------------------------------------------------------------------

OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CODED = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED = {"name": "weather", "description": "x", "parameters": PARAMETERS}
SHOWN: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": NAMED}],
    MESSAGES: [{"name": "weather", "input_schema": PARAMETERS}],
    RESPONSES: [NAMED | {"type": "function"}],
    OLLAMA: [{"type": "function", "function": NAMED}],
}


def called(path: str, answer: httpx.Response, *, streamed: bool) -> tuple[str, str, list[Any], str]:
    """Reasoning, text, calls, and the reason of the end."""
    body = answer.json() if not streamed else {}
    events = events_of(answer) if streamed else []
    match path:
        case "/v1/chat/completions":
            choices = [event["choices"][0] for event in events or [body] if event["choices"]]
            messages = [choice.get("delta", choice.get("message")) for choice in choices]
            written = [item["function"] for message in messages for item in message.get("tool_calls") or ()]
            [name] = [record["name"] for record in written if record.get("name")]
            arguments = orjson.loads("".join(record["arguments"] for record in written))
            thoughts = "".join(message.get("reasoning_content") or "" for message in messages)
            said = "".join(message.get("content") or "" for message in messages)
            return thoughts, said, [(name, arguments)], choices[-1]["finish_reason"]
        case "/v1/messages":
            if streamed:
                kinds = {
                    event["index"]: event["content_block"] for event in events if event["type"] == "content_block_start"
                }
                for item in (event for event in events if event["type"] == "content_block_delta"):
                    for name in ("thinking", "text", "partial_json"):
                        block = kinds[item["index"]]
                        block[name] = block.get(name, "") + item["delta"].get(name, "")
                content = [*kinds.values()]
                for block in (event for event in content if event["type"] == "tool_use"):
                    block["input"] = orjson.loads(block["partial_json"])
                body = {"content": content, "stop_reason": events[-2]["delta"]["stop_reason"]}
            blocks = {event["type"]: event for event in body["content"]}
            call = blocks["tool_use"]
            said = blocks.get("text", {}).get("text", "")
            thoughts = blocks.get("thinking", {}).get("thinking", "")
            return thoughts, said, [(call["name"], call["input"])], body["stop_reason"]
        case "/v1/responses":
            output = (events[-1]["response"] if streamed else body)["output"]
            items = {event["type"]: event for event in output}
            call = items["function_call"]
            texts = [items[kind]["content"][0]["text"] if kind in items else "" for kind in ("reasoning", "message")]
            return texts[0], texts[1], [(call["name"], orjson.loads(call["arguments"]))], ""
        case _:
            messages = [event["message"] for event in events or [body]]
            calls = [item["function"] for message in messages for item in message.get("tool_calls", ())]
            texts = ["".join(message.get(kind, "") for message in messages) for kind in ("thinking", "content")]
            return texts[0], texts[1], [(entry["name"], entry["arguments"]) for entry in calls], ""


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("call", [OSLO, CODED])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_ends_the_reasoning(path: str, call: str, opened: bool, streamed: bool) -> None:
    """No mark closes the reasoning, or only one behind the call."""
    template = (OPENED if opened else HYBRID).replace(
        "<tool_call>{{", "<function={{" if call == CODED else "<tool_call>{{"
    )
    for end in ("", "\n</think>\n\n"):
        async with asking(f"{'' if opened else '<think>'}I see <tool_call>.\n{call}{end}", template) as (http, _):
            asked = {name: value for name, value in ASKED[path].items() if streamed or name != "stream_options"}
            answer = await http.post(path, json=asked | {"tools": SHOWN[path], "stream": streamed})
        assert answer.status_code == 200, answer.text
        thoughts, said, calls, reason = called(path, answer, streamed=streamed)
        assert (thoughts, said.strip(), calls) == ("I see <tool_call>.", "", [("weather", {"city": "Oslo"})])
        assert reason in ("tool_calls", "tool_use", "")


async def test_tokens_of_a_call_are_no_reasoning() -> None:
    async with asking(f"<think>the fox{OSLO}") as (http, _):
        body = (await http.post(CHAT, json=HELLO | {"tools": SHOWN[CHAT]})).json()
    num_reasoning = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(ids_of("the fox", tagged())) <= num_reasoning < len(ids_of(f"the fox{OSLO}", tagged())) // 2


async def test_text_like_a_call_stays_reasoning() -> None:
    async with asking("<think>I write <tool_call> and { \n</think>\n\nthe dog") as (http, _):
        body = (await http.post(CHAT, json=HELLO | {"tools": SHOWN[CHAT]})).json()
    assert parts_of(CHAT, body) == ("I write <tool_call> and { \n", "the dog")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_string_is_no_end_of_a_call(path: str, streamed: bool) -> None:
    """Cut arguments were answered with the finish reason "tool_calls"."""
    stop = {"stop_sequences" if path == MESSAGES else "stop": ["Os", "dog"]}
    asked = {name: value for name, value in ASKED[path].items() if streamed or name != "stream_options"}
    async with asking(f"<think>x</think>the fox\n{OSLO}\nthe dog") as (http, _):
        answer = await http.post(path, json=asked | stop | {"tools": SHOWN[path], "stream": streamed})
    _, _, calls, reason = called(path, answer, streamed=streamed)
    assert calls == [("weather", {"city": "Oslo"})]
    assert reason == ("stop_sequence" if path == MESSAGES else "tool_calls")


async def test_reasoning_before_bound_calls_has_none() -> None:
    async with asking("x", HYBRID) as (http, worker):
        await http.post(CHAT, json=HELLO | {"tools": SHOWN[CHAT], "tool_choice": "required"})
    grammar = worker.jobs[0].sampling.grammar
    assert accepts(grammar, f"<think>the fox</think>{OSLO}")
    assert not accepts(grammar, f"<think>the fox{OSLO}</think>{OSLO}")


# -- structured output ------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OF_JSON: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
THINK_FIRST = "<|channel|>analysis<|message|>the fox<|end|><|start|>assistant"


def accepts(grammar: str, text: str, *, ended_by: str = "<|end|>") -> bool:
    """Does the worker's library accept all of the text under the grammar?"""
    [end], tokenizer = ids_of(ended_by, tagged()), without_specials(tagged().backend.to_str())
    library = LLTokenizer(tokenizer, n_vocab=512, eos_token=[end])
    matcher = LLMatcher(library, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(ids_of(text, tagged()))
    return bool(taken == len(ids_of(text, tagged())) and (matcher.is_accepting() or matcher.is_stopped()))


@pytest.mark.parametrize(
    ("bound", "answer"),
    [
        (OF_JSON, '{"a": 5}'),
        ({"structured_outputs": {"regex": "fo+x"}}, "foox"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
        ({"structured_outputs": {"grammar": 'start: NUMBER "x"\nNUMBER: /[0-9]+/'}}, "12x"),
    ],
)
async def test_a_bound_answer_begins_after_the_reasoning(bound: dict[str, Any], answer: str) -> None:
    grammars = {}
    for name, template, kind in (
        ("hybrid", HYBRID, "qwen3"),
        ("opened", OPENED, "qwen3"),
        ("harmony", HARMONY, "gpt_oss"),
    ):
        async with asking("x", template, kind) as (http, worker):
            asked = await http.post(CHAT, json=HELLO | bound)
            assert asked.status_code == 200, asked.text
            grammars[name] = worker.jobs[0].sampling.grammar
    hybrid, opened, harmony = grammars["hybrid"], grammars["opened"], grammars["harmony"]
    assert accepts(hybrid, f"<think>the fox {answer}</think>\n\n{answer}")
    assert accepts(hybrid, answer)
    assert not accepts(hybrid, f"the fox</think>{answer}")
    assert accepts(opened, f"the fox</think>\n{answer}")
    assert not accepts(opened, answer)
    assert not accepts(opened, "the fox</think>the dog")
    assert not accepts(opened, "the fox")
    ended_by = "<|return|>"
    assert accepts(harmony, f"{THINK_FIRST}<|channel|>final<|message|>{answer}", ended_by=ended_by)
    assert accepts(harmony, f"<|channel|>final<|message|>{answer}", ended_by=ended_by)
    assert not accepts(harmony, f"{THINK_FIRST}{answer}", ended_by=ended_by)


async def test_an_answer_without_reasoning_is_bound_from_its_start() -> None:
    async with asking("x") as (http, worker):
        await http.post(CHAT, json=HELLO | OF_JSON | {"reasoning_effort": "none"})
    assert accepts(worker.jobs[0].sampling.grammar, '{"a": 5}')
    assert "think" not in worker.jobs[0].sampling.grammar


# -- calls behind reasoning --------------------------------------------------------------------------------------------

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALLING = [
    (HYBRID, "qwen3", '<think>Hm.</think><tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'),
    (MISTRAL, "mistral", '[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"a": 5}'),
    (HARMONY, "gpt_oss", f'{THINK_FIRST}{CALL}{{"a": 5}}'.replace("the fox", "Hm.")),
]


@pytest.mark.parametrize(("template", "name", "said"), CALLING)
async def test_calls_follow_reasoning_and_are_bound_there(template: str, name: str, said: str) -> None:
    async with asking(said, template, name) as (http, worker):
        body = HELLO | {"tools": TOOLS}
        whole = (await http.post(CHAT, json=body)).json()["choices"][0]
        streamed = events_of(await http.post(CHAT, json=body | {"stream": True}))
        required = await http.post(CHAT, json=body | {"tool_choice": "required", "parallel_tool_calls": False})
    assert required.status_code == 200, required.text
    message = whole["message"]
    assert (message["reasoning"], message["content"], whole["finish_reason"]) == ("Hm.", None, "tool_calls")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 5}'}
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    functions = [delta["tool_calls"][0]["function"] for delta in deltas if delta.get("tool_calls")]
    assert "".join(function["arguments"] for function in functions) == '{"a": 5}'
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    grammar, ended_by = worker.jobs[-1].sampling.grammar, "<|call|>" if name == "gpt_oss" else "<|end|>"
    assert accepts(grammar, said, ended_by=ended_by)
    assert not accepts(grammar, said.replace("5", '"x"'), ended_by=ended_by)
    assert not accepts(grammar, said.partition("Hm.")[0] + "Hm.", ended_by=ended_by)
