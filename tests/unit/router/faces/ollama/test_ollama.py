"""Ollama's API: the same jobs as a chat's, as lines of JSON unless the client wants one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from protos.errors import Overloaded
from tests.unit.router.faces.anthropic.test_messages import CALLS, SCHEMA, TOOLED, asking
from tests.unit.router.scripted import byte_level, saying, token_deltas

HELLO: dict[str, Any] = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hello"}]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "It knows.", "parameters": SCHEMA}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_an_answer_streamed_or_whole_is_the_same(path: str) -> None:
    asked = HELLO if path == "/api/chat" else {"model": "tiny", "prompt": "hello"}
    async with asking() as (http, generate):
        *lines, last = lines_of(await http.post(path, json=asked))
        whole = (await http.post(path, json=asked | {"stream": False})).json()

    def text(line: dict[str, Any]) -> Any:
        return line["response"] if path == "/api/generate" else line["message"]["content"]

    assert "".join(map(text, lines)) == text(whole) == "naïve café 🙂"
    assert len(lines) > 2
    assert not any(line["done"] for line in lines)
    for ending in (last, whole):
        assert (ending["done"], ending["done_reason"]) == (True, "stop")
        assert ending["prompt_eval_count"] == len(generate.jobs[0].prompt_ids)
        assert ending["eval_count"] > 3
        assert ending["total_duration"] >= ending["prompt_eval_duration"] > 0
    assert generate.jobs[0].prompt_ids == generate.jobs[1].prompt_ids


async def test_calls_are_sent_when_they_are_complete() -> None:
    async with asking(saying(CALLS, at_once=3), **TOOLED) as (http, _):
        lines = lines_of(await http.post("/api/chat", json=HELLO | {"tools": [WEATHER, NOW]}))
        whole = (await http.post("/api/chat", json=HELLO | {"tools": [WEATHER, NOW], "stream": False})).json()
    streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert streamed == whole["message"]["tool_calls"] == [
        {"function": {"name": "weather", "arguments": {"city": 'Paris "x"'}}},
        {"function": {"name": "now", "arguments": {}}},
    ]  # fmt: skip
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"] == "Let me look."


async def test_a_raw_prompt_has_no_template_and_format_binds_it() -> None:
    async with asking() as (http, generate):
        await http.post("/api/generate", json={"model": "tiny", "prompt": "hello", "raw": True})
        await http.post("/api/generate", json={"model": "tiny", "prompt": "hello", "format": SCHEMA})
        await http.post("/api/chat", json=HELLO | {"format": "json"})
    raw, schema, plain = generate.jobs
    assert byte_level().decode(raw.prompt_ids).endswith("hello")
    assert "user" not in byte_level().decode(raw.prompt_ids)
    assert "city" in schema.sampling.grammar
    assert plain.sampling.grammar


async def test_a_model_has_the_fingerprint_of_openais_replies() -> None:
    async with asking() as (http, _):
        [listed] = (await http.get("/api/tags")).json()["models"]
        [running] = (await http.get("/api/ps")).json()["models"]
        answer = (await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})).json()
    assert listed["digest"] == running["digest"] == answer["system_fingerprint"]


async def test_clients_find_the_model() -> None:
    async with asking(**TOOLED) as (http, _):
        [model] = (await http.get("/api/tags")).json()["models"]
        shown = (await http.post("/api/show", json={"model": model["name"]})).json()
        [running] = (await http.get("/api/ps")).json()["models"]
        by_name = (await http.post("/api/show", json={"name": model["name"]})).json()
        version = (await http.get("/api/version")).json()
        loaded = (await http.post("/api/chat", json={"model": "tiny"})).json()
    assert (model["name"], model["size"], model["details"]["family"]) == ("tiny", 2048, "llama")
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 4096
    assert (running["name"], running["context_length"]) == ("tiny", 4096)
    assert by_name == shown
    assert version["version"].count(".") == 2
    assert loaded["done_reason"] == "load"


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "a"}]])
@pytest.mark.parametrize("num_predict", [2**31, -3])
async def test_a_number_of_tokens_out_of_range_is_refused(num_predict: int, messages: list[Any]) -> None:
    """It was accepted where nothing is to be answered, and cut to the context elsewhere."""
    async with asking() as (http, _):
        body = {"model": "tiny", "messages": messages, "options": {"num_predict": num_predict}}
        refused = await http.post("/api/chat", json=body)
    assert refused.status_code == 400
    assert "num_predict" in refused.json()["error"]


@pytest.mark.parametrize("name", ["content", "thinking", "tool_name"])
async def test_a_number_is_no_text(name: str) -> None:
    call = {"function": {"name": "now", "arguments": {}}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call], name: 0}]
    async with asking(**TOOLED) as (http, _):
        refused = await http.post("/api/chat", json={"model": "tiny", "messages": turns})
    assert refused.status_code == 400
    assert f"'messages[1].{name}'" in refused.json()["error"]


async def test_a_silent_stream_has_its_head_and_no_other_line() -> None:
    computed = asyncio.Event()

    def script(job: Any) -> list[Any]:
        return [computed, *token_deltas([5, 6, 7], job)]

    async with (
        asking(script, keep_alive_s=0.1) as (http, _),
        http.stream("POST", "/api/chat", json=HELLO) as answer,
    ):
        computed.set()
        lines = [orjson.loads(line) async for line in answer.aiter_lines()]
    assert lines[-1]["done"]


async def test_errors_are_in_that_apis_form() -> None:
    def script(job: Any) -> list[Any]:
        return [*token_deltas([5, 6, 7], job)[:2], Overloaded("too busy")]

    images = {"messages": [{"role": "user", "content": "x", "images": ["iVBO"]}]}
    no_list = {"messages": [{"role": "user", "content": "x", "images": {}}]}
    no_calls = {"messages": [{"role": "assistant", "content": "x", "tool_calls": ""}]}
    async with asking(script) as (http, _):
        refused = [
            await http.post("/api/chat", json=HELLO | {"model": "other"}),
            await http.post("/api/chat", json=HELLO | images),
            await http.post("/api/chat", json=HELLO | no_list),
            await http.post("/api/chat", json=HELLO | {"options": {"temperature": 3}}),
            await http.post("/api/generate", json={"model": "tiny", "prompt": "x", "suffix": "y"}),
            await http.get("/api/pull"),
            await http.post("/api/chat", json=HELLO | no_calls),
            await http.post("/api/chat", json=HELLO | {"options": {"stop": ""}}),
        ]
        *_, last = lines_of(await http.post("/api/chat", json=HELLO))
    assert [answer.status_code for answer in refused] == [404, 400, 400, 400, 400, 404, 400, 400]
    assert all(answer.json().keys() == {"error"} for answer in refused)
    assert all("messages[0].images" in answer.json()["error"] for answer in refused[1:3])
    assert "options.temperature" in refused[3].json()["error"]
    assert "'options.stop' has a string of 0 characters" in refused[7].json()["error"]
    assert last == {"error": "too busy"}


@pytest.mark.parametrize(("name", "status"), [("gpt-4o:latest", 200), ("tiny", 200), ("gpt-5:latest", 404)])
async def test_a_tag_may_stand_behind_an_alias(name: str, status: int) -> None:
    async with asking(model_aliases=("gpt-4o",)) as (http, _):
        assert (await http.post("/api/show", json={"model": name})).status_code == status


async def test_texts_have_vectors() -> None:
    async with asking() as (http, generate):
        answer = await http.post("/api/embed", json={"model": "tiny:latest", "input": ["a", "b"], "truncate": True})
    assert answer.json()["embeddings"][1][:3] == pytest.approx([0.6, 0.8, 0.0])
    assert answer.json()["prompt_eval_count"] == sum(len(job.prompt_ids) for job in generate.jobs)
    assert answer.headers["x-baton-ignored"] == "truncate"


async def test_the_older_path_has_one_vector() -> None:
    async with asking() as (http, _):
        answer = await http.post("/api/embeddings", json={"model": "tiny", "prompt": "a", "keep_alive": 5})
        refused = await http.post("/api/embeddings", json={"model": "tiny", "input": "a"})
    assert answer.json()["embedding"][:3] == pytest.approx([0.6, 0.8, 0.0])
    assert answer.headers["x-baton-ignored"] == "keep_alive"
    assert (refused.status_code, refused.json()) == (400, {"error": "Missing required parameter: 'prompt'."})
