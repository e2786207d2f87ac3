"""The Messages API: the same jobs as a chat's, in that API's words, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from protos.errors import Overloaded, RateLimited
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.text.chat_template import ChatTemplate
from router.text.model_card import ModelCard
from router.text.tools.formats import ToolFormat
from tests.unit.router.scripted import Scripted, byte_level, make_gateway, saying, serving, tokenizer_end

HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}]}
# Qwen's order: tools first, calls between tags.
HERMES = ChatTemplate(
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)
ROOMY = ModelCard(
    name="tiny", max_model_len=4096, vocab_size=512, eos_token_ids=frozenset({tokenizer_end(byte_level())}),
    family="llama", num_bytes=2048,
)  # fmt: skip
TOOLED: dict[str, Any] = {"template": HERMES, "tool_format": ToolFormat.HERMES, "card": ROOMY}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "It knows.", "input_schema": SCHEMA}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
BRIEF: list[dict[str, Any]] = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@asynccontextmanager
async def asking(script: Any = None, **changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted]]:
    generate = Scripted(script or saying("naïve café 🙂"))
    async with (
        serving(make_gateway(generate, **changes)) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=60) as http,
    ):
        yield http, generate


async def send(http: httpx.AsyncClient, *, path: str = "/v1/messages", **changes: Any) -> httpx.Response:
    return await http.post(path, json=HELLO | changes, headers={"anthropic-version": "2023-06-01"})


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events, whose names are the types of their data."""
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        content = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(content)
    return events


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"max_tokens": 2}, ("max_tokens", None)),
        ({"stop_sequences": ["caf"]}, ("stop_sequence", "caf")),
        ({"max_tokens": 10_000}, ("model_context_window_exceeded", None)),
        ({}, ("end_turn", None)),
    ],
)
async def test_the_reason_for_the_end_is_named(changes: dict[str, Any], ending: tuple[str, str | None]) -> None:
    """Claude Code may send more max_tokens than the context holds."""
    text = "naïve café 🙂" * (100 if changes.get("max_tokens") == 10_000 else 1)
    async with asking(saying(text)) as (http, _):
        whole = (await send(http, **changes)).json()
        streamed = await send(http, stream=True, **changes)
    begun, *_, last, _ = events_of(streamed)
    for message in (whole, last["delta"]):
        assert (message["stop_reason"], message["stop_sequence"]) == ending
    assert whole["usage"] == last["usage"]
    for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"):
        assert begun["message"]["usage"][name] == whole["usage"][name], "Claude Code reads the prompt's usage here"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["request-id"] == streamed.headers["x-baton-request-id"]


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [({"type": "any"}, True), ({"type": "tool", "name": "now"}, True), ({"type": "auto"}, False),
     ({"type": "none"}, False), ({"type": "auto", "disable_parallel_tool_use": True}, True)],
)  # fmt: skip
async def test_the_choice_of_tools_binds_the_answer_as_in_a_chat(choice: dict[str, Any], grammar: bool) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    of_chat: Any = {"any": "required", "tool": named, "auto": "auto", "none": "none"}[choice["type"]]
    shown = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    chat = HELLO | {"tools": shown, "tool_choice": of_chat, "parallel_tool_calls": len(choice) == 1}
    async with asking(**TOOLED) as (http, generate):
        await send(http, tools=[NOW], tool_choice=choice)
        await http.post("/v1/chat/completions", json=chat)
    first, other = generate.jobs
    assert bool(first.sampling.grammar) == grammar
    assert first.sampling.grammar == other.sampling.grammar
    assert first.prompt_ids == other.prompt_ids


async def test_harmless_parameters_are_accepted_and_listed() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0f3;"},
        {"type": "text", "text": "Be brief."},
    ]
    odd = [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, BRIEF[0]]}]
    changes: dict[str, Any] = {
        "system": system, "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
        "context_management": {"edits": []}, "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "messages": [*HELLO["messages"], *odd, *HELLO["messages"]],
    }  # fmt: skip
    async with asking() as (http, generate):
        answers = [await send(http, **changes), await send(http, stream=True, **changes)]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["x-baton-ignored"] == (
            "system[0], messages[1].content[0]: redacted_thinking, tools[0]: web_search_20250305, thinking, "
            "context_management"
        )
    assert "billing" not in byte_level().decode(generate.jobs[0].prompt_ids)


async def test_an_assistants_last_turn_is_continued() -> None:
    async with asking() as (http, generate):
        await send(http, messages=[*HELLO["messages"], {"role": "assistant", "content": "The answer is ("}])
    assert byte_level().decode(generate.jobs[0].prompt_ids).endswith("assistant: The answer is (")


async def test_structured_output_is_bound_by_its_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    async with asking(card=ROOMY) as (http, generate):
        answer = await send(http, output_config=form)
    assert "city" in generate.jobs[0].sampling.grammar
    assert answer.headers["x-baton-ignored"] == "output_config.effort"


async def test_blocks_that_hold_a_text_are_read() -> None:
    text = {"type": "text", "text": "It rains."}
    blocks = [
        {"type": "search_result", "title": "Weather", "source": "https://w.example", "content": [text],
         "citations": {"enabled": True}},
        {"type": "document", "title": "Notes", "context": "of today",
         "source": {"type": "text", "media_type": "text/plain", "data": "Cold."}},
        {"type": "document", "source": {"type": "content", "content": [text]}},
        {"type": "tool_reference", "tool_name": "weather"},
    ]  # fmt: skip
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]},
    ]
    async with asking(**TOOLED) as (http, generate):
        answer = await send(http, messages=turns, tools=[NOW])
    assert answer.status_code == 200
    read = "Weather\nhttps://w.example\nIt rains.\nNotes\nof today\nCold.\nIt rains.\nweather"
    assert byte_level().decode(generate.jobs[0].prompt_ids).count(read) == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image: this model reads text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "'messages[0].content[0].source' has the type base64: this model reads text only",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "assistant", "content": [{"type": "document"}]}]}, "text, thinking, tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0].text'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "user, assistant, system"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"system": [{"type": "text", "text": "x", "cache_control": ""}]}, "'system[0].cache_control' is"),
        ({"messages": []}, "at least one message"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "'max_tokens' is 0: it must be an integer between 1 and"),
        ({"temperature": 3}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "'stop_sequences' has a string of 0 characters"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "'tools[0].input_schema' is an object"),
        ({"messages": [{"role": "user", "content": "hello" * 500}]}, "prompt is too long"),
    ],
)
async def test_a_bad_request_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    async with asking() as (http, generate):
        answer = await send(http, **changes)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert problem in answer.json()["error"]["message"]
    assert not generate.jobs


async def test_errors_have_that_apis_types_and_statuses(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'admin_keys = ["{hash_of("sk-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of("sk-acme")}"]\n')
    failures: list[Exception] = [
        Overloaded("too busy", retry_after_s=2), RateLimited("too much", retry_after_s=2), RuntimeError("a bug"),
    ]  # fmt: skip
    async with asking(lambda job: [failures.pop(0)], access=AccessControl(path), max_body_bytes=2000) as (http, _):
        unknown = await send(http)
        http.headers["x-api-key"] = "sk-acme"
        answers = [
            unknown,
            await send(http, model="claude-opus-4-1"),
            await http.get("/v1/messages"),
            await send(http, system="x" * 2000),
            await send(http, stream=True),
            await send(http),
            await send(http),
        ]
    told = [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]
    assert told == [
        (401, "authentication_error"), (404, "not_found_error"), (405, "invalid_request_error"),
        (413, "request_too_large"), (529, "overloaded_error"), (429, "rate_limit_error"), (500, "api_error"),
    ]  # fmt: skip
    assert answers[4].headers["retry-after"] == "2"
    assert all("request-id" in answer.headers for answer in answers)


async def test_aliases_serve_names_of_other_models() -> None:
    async with asking(model_aliases=("claude-*",)) as (http, _):
        answer = await send(http, model="claude-sonnet-4-5")
        other = await send(http, model="gpt-5")
    assert answer.json()["model"] == "tiny"
    assert other.status_code == 404
