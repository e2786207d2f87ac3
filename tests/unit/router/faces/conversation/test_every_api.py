"""The same conversation through every API makes the same job, under the same rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types import chat
from openai.types import responses as of_responses

from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.faces.conversation.parts import IGNORED, Ignored
from router.text.chat_template import ChatTemplate
from tests.unit.router.faces.anthropic.test_messages import BRIEF, SCHEMA, TOOLED, WEATHER, asking
from tests.unit.router.scripted import byte_level
from tests.unit.router.sdk_types import read_as

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Well?"},
    {"role": "user", "content": "naïve café"},
]
FACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 7, "seed": 5},
    "/v1/messages": {"messages": TURNS[1:], "system": "Be brief.", "max_tokens": 7, "seed": 5},
    "/v1/responses": {"input": TURNS[1:], "instructions": "Be brief.", "max_output_tokens": 7, "seed": 5},
    "/api/chat": {"messages": TURNS, "options": {"num_predict": 7, "seed": 5}, "stream": False},
}


def counted(path: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and the answer, by the API's usage."""
    usage = answer.get("usage", answer)
    match path:
        case "/v1/messages":
            num_cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
            return usage["input_tokens"] + num_cached, usage["output_tokens"]
        case "/v1/responses":
            return usage["input_tokens"], usage["output_tokens"]
        case "/api/chat":
            return usage["prompt_eval_count"], usage["eval_count"]
        case _:
            return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize(
    ("name", "alias", "served"),
    [("claude-opus-5", "claude-*", True), ("a[1]", "a[1]", True), ("a1", "a[1]", False), ("ab", "a?", False)],
)
async def test_in_an_alias_only_an_asterisk_is_any_text(name: str, alias: str, served: bool) -> None:
    async with asking(model_aliases=(alias,)) as (http, _):
        assert (await http.get(f"/v1/models/{name}")).status_code == (200 if served else 404)


CACHED = {"cache_control": {"type": "ephemeral"}}
FUNCTION = {"name": "weather", "description": "It knows.", "parameters": SCHEMA}
CALLED = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CONVERSED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "max_tokens": 3, "seed": 5, "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [
            {"role": "system", "content": BRIEF},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hm."}], "reasoning_content": "A city.",
             "tool_calls": [{"id": "000000001", "type": "function", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "000000001", "content": [{"type": "text", "text": "7"}]},
            {"role": "user", "content": "And?"},
        ],
    },
    "/v1/messages": {
        "max_tokens": 3, "seed": 5, "tools": [WEATHER | CACHED], "system": [BRIEF[0], BRIEF[1] | CACHED],
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "A city.", "signature": "x"}, {"type": "text", "text": "Hm."},
                {"type": "tool_use", "id": "000000001", "name": "weather", "input": {"city": "Oslo"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "000000001", "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "And?"} | CACHED]},
        ],
    },
    "/v1/responses": {
        "max_output_tokens": 3, "seed": 5, "tools": [{"type": "function", **FUNCTION}],
        "input": [
            {"role": "system", "content": [{"type": "input_text", "text": text["text"]} for text in BRIEF]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "A city."}]},
            {"type": "message", "id": "m", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Hm.", "annotations": []}]},
            {"type": "function_call", "id": "f", "call_id": "000000001", **CALLED},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "function_call_output", "call_id": "000000001", "output": "7"},
            {"role": "user", "content": "And?"},
        ],
    },
    "/api/chat": {
        "options": {"num_predict": 3, "seed": 5, "num_ctx": 8192}, "keep_alive": "5m", "stream": False,
        "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hm.", "thinking": "A city.",
             "tool_calls": [{"function": CALLED | {"arguments": {"city": "Oslo"}}}]},
            {"role": "tool", "content": "7", "tool_name": "weather"},
            {"role": "user", "content": "And?"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        ({"x-claude-code-session-id": "s1", "x-session-id": "s2"}, {}),
        ({"x-session-id": "s1"}, {"prompt_cache_key": "s2"}),
        ({"session_id": "s1"}, {}),
        ({"session-id": "s1"}, {}),
        ({"x-dynamo-session-id": "s1"}, {}),
        ({}, {"prompt_cache_key": "s1"}),
        ({"x-session-id": ""}, {"metadata": {"user_id": '{"device_id": "d", "session_id": "s1"}'}}),
        ({}, {"metadata": {"user_id": "user_ab_account__session_s1"}}),
    ],
)
async def test_a_session_is_known_by_what_clients_send(sent: dict[str, str], body: dict[str, Any]) -> None:
    """And changes no answer."""
    paths = [path for path in FACES if "metadata" not in body or path in ("/v1/messages", "/v1/responses")]
    async with asking() as (http, generate):
        for path in paths:
            more = body if path != "/api/chat" else {}
            answers = [await http.post(path, json={"model": "tiny"} | FACES[path] | part, headers=headers)
                       for part, headers in ((more, sent), ({}, {}))]  # fmt: skip
            assert [answer.status_code for answer in answers] == [200, 200]
            named, plain = generate.jobs[-2:]
            assert (named.session, plain.session) == ("s1" if more or sent else "", "")
            assert (named.prompt_ids, named.sampling, named.cache_salt) == (
                plain.prompt_ids, plain.sampling, plain.cache_salt
            )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/messages", {"metadata": {"user_id": user}})
          for user in ("{", "[1]", '{"session_id": 5}', "jane", 5, None)),
        ("/v1/messages", {"prompt_cache_key": 5}),
        ("/api/chat", {"prompt_cache_key": ["a"], "metadata": 5}),
    ],
)  # fmt: skip
async def test_a_user_is_no_session(path: str, body: dict[str, Any]) -> None:
    async with asking() as (http, generate):
        reply = await http.post(path, json={"model": "tiny"} | body | FACES[path])
    assert (reply.status_code, generate.jobs[0].session) == (200, "")


async def test_one_conversation_is_the_same_through_every_api(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'admin_keys = ["{hash_of("sk-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of("sk-acme")}"]\n')
    headers = {"authorization": "Bearer sk-acme", "x-baton-max-ttft-ms": "5000"}
    bodies = {face: {"model": "tiny"} | body for face, body in CONVERSED.items()}
    async with asking(access=AccessControl(path), **TOOLED) as (http, generate):
        refused = [(await http.post(face, json=body)).status_code for face, body in bodies.items()]
        answers = [await http.post(face, json=body, headers=headers) for face, body in bodies.items()]
        num_jobs = len(generate.jobs)
        read = [
            (await http.post(f"/v1/{face}", json=bodies[f"/v1/{face.partition('/')[0]}"], headers=headers)).json()
            for face in ("messages/count_tokens", "responses/input_tokens")
        ]
        metrics = (await http.get("/metrics")).text
    assert refused == [401] * len(FACES)
    assert [answer.status_code for answer in answers] == [200] * len(FACES)
    assert len({job.prompt_ids for job in generate.jobs}) == 1
    assert len({job.sampling for job in generate.jobs}) == 1
    assert {(job.tenant, job.max_ttft_s) for job in generate.jobs} == {("acme", 5.0)}
    chat, messages, responses, ollama = answers
    usage = chat.json()["usage"]
    assert {counted(face, answer.json()) for face, answer in zip(FACES, answers, strict=True)} == {
        (usage["prompt_tokens"], 3)
    }
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert messages.json()["usage"]["cache_read_input_tokens"] == num_cached > 0
    assert responses.json()["usage"]["input_tokens_details"]["cached_tokens"] == num_cached
    assert [one["input_tokens"] for one in read] == [usage["prompt_tokens"]] * 2
    assert len(generate.jobs) == num_jobs, "counting runs nothing"
    assert responses.headers[IGNORED] == "input[5]: web_search_call"
    assert (ollama.headers[IGNORED], ollama.json()["done_reason"]) == ("options.num_ctx, keep_alive", "length")
    for endpoint in ("chat.completions", "messages", "responses", "ollama.chat"):
        assert f'baton_requests_total{{endpoint="{endpoint}",model="",outcome="ok"}} 1.0' in metrics


@pytest.mark.parametrize("ignored", [False, True])
async def test_replayed_answers_go_on_behind_their_end_in_every_api_of_agents(ignored: bool) -> None:
    faces = {face: body for face, body in FACES.items() if face != "/api/chat"}
    async with asking() as (http, generate):
        for face, body in faces.items():
            answer = await http.post(face, json={"model": "tiny", "ignore_eos": ignored} | body)
            assert (answer.status_code, answer.headers.get("x-baton-ignored")) == (200, None)
    assert [job.sampling.ignore_eos for job in generate.jobs] == [ignored] * len(faces)


async def test_a_later_system_turn_is_read_through_every_api() -> None:
    """Claude Code sends such turns."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    )
    template = ChatTemplate(source + "<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}")
    turns = [*TURNS[:2], {"role": "system", "content": "Be kind."}, *TURNS[2:]]
    faces: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/messages", {"messages": turns[1:], "system": "Be brief.", "max_tokens": 7}),
        ("/v1/messages", {"messages": turns, "max_tokens": 7}),
        ("/v1/responses", {"input": turns[1:], "instructions": "Be brief."}),
        ("/api/chat", {"messages": turns, "stream": False}),
    ]
    async with asking(template=template) as (http, generate):
        answers = [await http.post(face, json={"model": "tiny"} | body) for face, body in faces]
        both = await http.post(
            "/v1/messages", json={"model": "tiny", "messages": turns, "system": "Be quick.", "max_tokens": 7}
        )
    assert [answer.status_code for answer in (*answers, both)] == [200] * 6
    *same, last = (byte_level().decode(job.prompt_ids) for job in generate.jobs)
    assert set(same) == {
        "<|user|>system: Be brief.<|end|><|user|>user: hello\n\nBe kind.<|end|><|user|>assistant: Well?<|end|>"
        "<|user|>user: naïve café<|end|>"
    }
    assert last.startswith("<|user|>system: Be quick.\n\nBe brief.<|end|><|user|>user: hello")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("num_tools", [0, 512, 513])
async def test_tools_have_the_same_limits_everywhere(face: str, num_tools: int) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    functions = [{"name": f"{number:->128}", "parameters": {"type": "object"}} for number in range(num_tools)]
    tools = [{"type": "function", "function": function, **cached} for function in functions]
    if face == "/v1/responses":
        tools = [{"type": "function", **function, **cached} for function in functions]
    if face == "/v1/messages":
        tools = [{"name": function["name"], "input_schema": function["parameters"], **cached} for function in functions]
    choice = {"type": "auto"} if face == "/v1/messages" else "auto"
    card = replace(TOOLED["card"], max_model_len=10**6)
    async with asking(**TOOLED | {"card": card}) as (http, _):
        answer = await http.post(face, json={"model": "tiny", "tools": tools, "tool_choice": choice} | FACES[face])
    assert answer.status_code == (200 if num_tools <= 512 else 400)


HELLO = [{"role": "user", "content": "hello"}]
EVERYTHING = {"n": 2, "prompt_logprobs": 1, "return_token_ids": True}
SHAPES: tuple[tuple[str, dict[str, Any], Any, Any], ...] = (
    ("/v1/chat/completions", {"messages": HELLO}, chat.ChatCompletion, chat.ChatCompletionChunk),
    (
        "/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **EVERYTHING},
        chat.ChatCompletion, None,
    ),
    ("/v1/completions", {"prompt": "hello"}, openai.types.Completion, None),
    (
        "/v1/completions", {"prompt": "hello", "logprobs": 2, **EVERYTHING}, openai.types.Completion, None,
    ),
    (
        "/v1/messages", {"messages": HELLO, "max_tokens": 9}, anthropic.types.Message,
        anthropic.types.RawMessageStreamEvent,
    ),
    ("/v1/messages/count_tokens", {"messages": HELLO}, anthropic.types.MessageTokensCount, None),
    ("/v1/responses", {"input": "hello"}, of_responses.Response, of_responses.ResponseStreamEvent),
    (
        "/v1/responses", {"input": "hello", "max_output_tokens": 1, "instructions": "x", "metadata": {"a": "b"}},
        of_responses.Response, None,
    ),
    ("/v1/embeddings", {"input": "hello"}, openai.types.CreateEmbeddingResponse, None),
)  # fmt: skip


@pytest.mark.parametrize(("path", "body", "whole", "event"), SHAPES)
async def test_the_types_of_the_apis_clients_read_every_answer(
    path: str, body: dict[str, Any], whole: Any, event: Any
) -> None:
    async with asking() as (http, _):
        read_as(whole, (await http.post(path, json={"model": "tiny"} | body)).json())
        streamed = (await http.post(path, json={"model": "tiny", "stream": True} | body)).text if event else ""
    lines = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    for answer in lines:
        if answer != {"type": "ping"}:
            read_as(event, answer)
    assert bool(lines) == bool(event)


async def test_a_model_is_read_by_both_clients() -> None:
    async with asking() as (http, _):
        model = (await http.get("/v1/models/tiny")).json()
    ours = {name: model.pop(name) for name in ("max_model_len", "root", "parent", "weights")}
    assert (openai.types.Model.model_validate(model).id, ours["root"]) == ("tiny", "tiny")
    assert anthropic.types.ModelInfo.model_validate(model).display_name == "tiny"


def test_the_header_has_plain_names_and_the_number_of_others() -> None:
    ignored = Ignored()
    for name in ("thinking", "a\r\nset-cookie: b", "é", "thinking", *(f"field{number}" for number in range(100))):
        ignored.add(name)
    [names] = ignored.headers().values()
    assert names.startswith("thinking, field0, field1, ")
    *shown, more = names.split(", ")
    assert (len(shown), more) == (32, "and 71 more")
    assert ignored.headers().keys() == {IGNORED}


@pytest.mark.parametrize(("face", "name"), [("/v1/responses", "input"), ("/v1/chat/completions", "messages")])
async def test_a_part_that_is_no_object_is_named(face: str, name: str) -> None:
    async with asking() as (http, _):
        refused = await http.post(face, json={"model": "tiny", name: [*HELLO, 5]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"{name}[1]")
