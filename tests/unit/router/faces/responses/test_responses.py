"""The Responses API through the `openai` client: the same jobs as a chat's, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types import responses as of_sdk

from router.text.chat_template import ChatTemplate
from tests.unit.router.faces.anthropic.test_messages import CALLS, SCHEMA, TOOLED, asking
from tests.unit.router.scripted import byte_level, saying, talking

HELLO: dict[str, Any] = {"model": "tiny", "input": "hello"}
WEATHER: dict[str, Any] = {
    "type": "function", "name": "weather", "description": "It knows.", "parameters": SCHEMA, "strict": None,
}  # fmt: skip
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": None, "strict": None}

ONLY_SEARCH: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events, in the order of their numbers, each in the form of the client's model of it."""
    events = []
    for number, event in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, _, data = event.partition("\n")
        content = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        assert content["sequence_number"] == number
        events.append(content)
    return events


async def test_an_answer_streamed_or_whole_is_the_same() -> None:
    async with talking() as (client, generate):
        whole = await client.responses.create(**HELLO, metadata={"run": "7"})
        async with client.responses.stream(**HELLO) as stream:
            kinds = [event.type async for event in stream]
            joined = await stream.get_final_response()
    assert whole.output_text == joined.output_text == "naïve café 🙂"
    assert whole.status == joined.status == "completed"
    assert whole.metadata == {"run": "7"}
    assert whole.usage == joined.usage
    usage, num_prompt = whole.usage, len(generate.jobs[0].prompt_ids)
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (num_prompt, num_prompt // 2)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


async def test_events_are_complete_and_numbered() -> None:
    kinds: dict[str, Any] = {
        "response.created": of_sdk.ResponseCreatedEvent,
        "response.in_progress": of_sdk.ResponseInProgressEvent,
        "response.output_item.added": of_sdk.ResponseOutputItemAddedEvent,
        "response.content_part.added": of_sdk.ResponseContentPartAddedEvent,
        "response.output_text.delta": of_sdk.ResponseTextDeltaEvent,
        "response.output_text.done": of_sdk.ResponseTextDoneEvent,
        "response.content_part.done": of_sdk.ResponseContentPartDoneEvent,
        "response.function_call_arguments.delta": of_sdk.ResponseFunctionCallArgumentsDeltaEvent,
        "response.function_call_arguments.done": of_sdk.ResponseFunctionCallArgumentsDoneEvent,
        "response.output_item.done": of_sdk.ResponseOutputItemDoneEvent,
        "response.completed": of_sdk.ResponseCompletedEvent,
    }
    async with asking(saying(CALLS, at_once=3), **TOOLED) as (http, _):
        streamed = await http.post("/v1/responses", json=HELLO | {"tools": [WEATHER, NOW], "stream": True})
        whole = (await http.post("/v1/responses", json=HELLO | {"tools": [WEATHER, NOW]})).json()
    events = events_of(streamed)
    assert {event["type"] for event in events} == kinds.keys()
    for event in events:
        kinds[event["type"]].model_validate(event)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"], "Codex goes by these"
    for text, weather, now in (done, whole["output"]):
        assert text["content"][0]["text"] == "Let me look."
        assert (weather["type"], weather["name"]) == ("function_call", "weather")
        assert json.loads(weather["arguments"]) == {"city": 'Paris "x"'}
        assert (now["name"], now["arguments"], now["status"]) == ("now", "{}", "completed")
    of_weather = [event["delta"] for event in events if event.get("item_id") == done[1]["id"] and "delta" in event]
    assert "".join(of_weather) == done[1]["arguments"]
    assert len(of_weather) > 3


async def test_reasoning_between_a_message_and_its_call_is_read() -> None:
    items = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hm."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A city."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    async with asking(**TOOLED) as (http, generate):
        await http.post("/v1/responses", json={"model": "tiny", "instructions": "Be brief.", "input": items})
    prompt = byte_level().decode(generate.jobs[0].prompt_ids)
    assert "assistant: Hm.(A city.)c1 weather({})" in prompt


async def test_codexs_parameters_are_accepted_and_listed() -> None:
    source = "{% for m in messages %}{% if m.role == 'developer' or (m.role == 'system' and not loop.first) %}"
    source += "{{ raise_exception('no') }}{% endif %}"
    source += "<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    said = [{"type": "input_text", "text": "<permissions>"}]
    codex: dict[str, Any] = {
        "model": "tiny", "instructions": "You are a coding agent.", "tool_choice": "auto", "store": False,
        "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "thread-1",
        "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"}, "client_metadata": {"x": "y"}, "max_output_tokens": 20,
        "tools": [{"type": "custom", "name": "apply_patch", "format": {}}, {"type": "web_search"}],
        "input": [
            {"type": "message", "role": "developer", "content": said},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        ],
    }  # fmt: skip
    async with asking(template=ChatTemplate(source)) as (http, generate):
        answer = await http.post("/v1/responses", json=codex)
    assert answer.status_code == 200
    assert answer.headers["x-baton-ignored"] == (
        "reasoning.effort, tools[0]: custom, tools[1]: web_search, reasoning.summary, text.verbosity, include, "
        "client_metadata"
    )
    prompt = byte_level().decode(generate.jobs[0].prompt_ids)
    assert prompt == "<|user|>system: You are a coding agent.\n\n<permissions><|end|><|user|>user: hello<|end|>"
    assert generate.jobs[0].session == "thread-1"


async def test_a_cut_answer_is_incomplete() -> None:
    async with asking() as (http, _):
        whole = (await http.post("/v1/responses", json=HELLO | {"max_output_tokens": 2})).json()
        events = events_of(await http.post("/v1/responses", json=HELLO | {"max_output_tokens": 2, "stream": True}))
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"


async def test_structured_output_and_tool_choice_bind_the_answer() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    async with asking(**TOOLED) as (http, generate):
        for asked in (
            {"text": {"format": form}},
            {"tools": [WEATHER, NOW], "tool_choice": {"type": "function", "name": "weather"}},
            {"tools": [WEATHER, NOW], "tool_choice": {
                "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}},
        ):  # fmt: skip
            assert (await http.post("/v1/responses", json=HELLO | asked)).status_code == 200
    assert all("city" in job.sampling.grammar for job in generate.jobs)
    assert not any('"now"' in job.sampling.grammar for job in generate.jobs)


async def test_a_skipped_tool_as_the_only_allowed_one_is_never_called() -> None:
    async with asking(**TOOLED) as (http, generate):
        asked = HELLO | {"tools": [{"type": "web_search"}, NOW], "tool_choice": ONLY_SEARCH}
        answer = await http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["type"] == "message"
    assert "now" not in generate.jobs[0].sampling.grammar


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"store": True}, "'store'"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id'"),
        ({"conversation": "conv_1"}, "'conversation'"),
        ({"background": True}, "'background'"),
        ({"input": []}, "'input'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'input[0]'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image: this model reads text"),
        ({"input": [{"type": "reasoning", "content": 0}, {"role": "user", "content": "a"}]}, "'input[0].content'"),
        ({"input": [{"role": "robot", "content": ""}]}, "'input[0].role'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "'input[0].arguments'"),
        ({"tool_choice": "required"}, "'tool_choice' is required and there are no tools"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "and no tool is a function"),
        ({"tool_choice": ONLY_SEARCH | {"mode": "required"}, "tools": [{"type": "web_search"}, NOW]}, "'tool_choice'"),
        ({"tools": [{"type": "function"}]}, "'tools[0].name'"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "'max_output_tokens' is 0: it must be an integer between 1 and"),
        ({"max_output_tokens": -1}, "'max_output_tokens' is -1: it must be an integer between 1 and"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
async def test_a_bad_request_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    async with talking() as (client, generate):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**HELLO | changes)
    assert problem in refused.value.message
    assert not generate.jobs


async def test_a_template_error_names_the_input() -> None:
    template = ChatTemplate("{{ raise_exception('only users may speak') }}")
    async with talking(template=template) as (client, _):
        with pytest.raises(openai.BadRequestError, match="only users may speak") as refused:
            await client.responses.create(**HELLO)
    assert refused.value.param == "input"
