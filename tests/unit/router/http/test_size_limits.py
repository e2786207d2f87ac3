"""Prompts that are too long for the model are refused in one message's time, before validation, templates and
tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.gateway import Gateway
from router.http import body as bodies
from router.http.body import MAX_PIECES
from router.text.model_card import ModelCard
from router.text.sampling_request import MAX_CHOICES
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving, with_card

CONTEXT = 256  # of make_gateway's model
SAID = {"role": "user", "content": "x"}


async def post(path: str, body: dict[str, Any], gateway: Gateway | None = None) -> httpx.Response:
    gateway = gateway or make_gateway(Scripted(saying("hi")))
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        return await client.post(path, json=body)


@pytest.fixture
def unvalidated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test at a validation: sizes must be checked first."""

    def parse(*given: object) -> None:
        pytest.fail("the body was validated")

    monkeypatch.setattr(bodies, "parse_body", parse)


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("/v1/chat/completions", {"messages": [SAID] * 257}, "messages", "257 messages and text parts: at most 256"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 256}]},
            "messages",
            "257 messages and text parts: at most 256",
        ),
        ("/tokenize", {"messages": [SAID] * 257}, "messages", "at most 256"),
        ("/detokenize", {"tokens": [5] * 257}, "tokens", "257 token ids: at most 256"),
        ("/v1/completions", {"prompt": [5] * 256}, "prompt", "resulted in 256 tokens"),
        ("/v1/completions", {"prompt": [[5], [5] * 256]}, "prompt[1]", "resulted in 256 tokens"),
    ],
)
async def test_oversized_input_is_refused_before_validation(
    path: str, body: dict[str, Any], param: str, told: str
) -> None:
    response = await post(path, {"model": "tiny"} | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")
    assert told in error["message"]


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("prompt", ["", []])
async def test_very_many_prompts_are_refused_before_they_are_validated(prompt: Any) -> None:
    response = await post("/v1/completions", {"model": "tiny", "prompt": [prompt] * (MAX_CHOICES + 1)})
    assert response.status_code == 400
    assert f"{MAX_CHOICES + 1} prompts: it must have at most {MAX_CHOICES}" in response.json()["error"]["message"]


async def test_a_long_context_still_has_a_bounded_number_of_messages() -> None:
    card = ModelCard(name="long", max_model_len=2**20, vocab_size=512)
    gateway = make_gateway(Scripted(saying("hi")), card=card)
    full = await post("/tokenize", {"messages": [SAID] * MAX_PIECES}, gateway)
    over = await post("/tokenize", {"messages": [SAID] * (MAX_PIECES + 1)}, gateway)
    assert full.status_code == 200
    assert f"at most {MAX_PIECES} are read" in over.json()["error"]["message"]


async def test_as_many_tokens_as_the_context_holds_are_detokenized() -> None:
    whole = (await post("/tokenize", {"prompt": "x", "add_special_tokens": False})).json()["tokens"]
    response = await post("/detokenize", {"tokens": whole * CONTEXT})
    assert response.json() == {"prompt": "x" * CONTEXT}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stop", ["", [""], ["x", ""]])
async def test_an_empty_stop_string_is_refused_however_it_comes(path: str, stop: Any) -> None:
    body = {"model": "tiny", "messages": [SAID]} if "chat" in path else {"model": "tiny", "prompt": "x"}
    response = await post(path, body | {"stop": stop})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"
    assert "a string of 0 characters: each must have 1 to 512" in response.json()["error"]["message"]


@pytest.mark.parametrize("nothing", [None, []])
async def test_no_stop_strings_may_be_said_in_two_ways(nothing: Any) -> None:
    assert (await post("/v1/completions", {"model": "tiny", "prompt": "x", "stop": nothing})).status_code == 200


Body = dict[str, Any]
WRONG: list[tuple[str, Callable[[Body], Body]]] = [
    ("chat/", lambda body: body),
    ("chat", lambda body: body | {"messages": [{"role": "user", "content": "x" * 10**6}]}),
    ("chat", lambda body: body | {"messages": [[]] * 10**5}),
    ("chat", lambda body: body | {"messages": {"role": "user"}}),
    ("chat", lambda body: body | {"messages": [SAID | {"content": None}]}),
    ("chat", lambda body: body | {"messages": [SAID | {"content": {}}]}),
    ("chat", lambda body: body | {"messages": [SAID | {"content": [[]] * 200}]}),
    ("chat", lambda body: body | {"messages": [SAID | {"tool_calls": [{"id": "1"}]}]}),
    ("chat", lambda body: body | {"chat_template_kwargs": {"messages": [[]]}}),
    ("chat", lambda body: body | {"continue_final_message": True, "messages": [SAID | {"content": ""}]}),
    ("chat", lambda body: body | {"continue_final_message": True, "add_generation_prompt": True}),
    ("chat", lambda body: body | {"max_completion_tokens": 10**9}),
    ("chat", lambda body: body | {"max_completion_tokens": 10**30}),
    ("chat", lambda body: body | {"max_tokens": -1}),
    ("chat", lambda body: body | {"n": 129}),
    ("chat", lambda body: body | {"n": 0}),
    ("chat", lambda body: body | {"model": "x" * 10**6}),
    ("chat", lambda body: body | {"model": ["tiny"]}),
    ("chat", lambda body: body | {"temperature": 1e308}),
    ("chat", lambda body: body | {"temperature": -0.1}),
    ("chat", lambda body: body | {"seed": 2**64}),
    ("chat", lambda body: body | {"seed": "1"}),
    ("chat", lambda body: body | {"logit_bias": {"5" * 9: 1}}),
    ("chat", lambda body: body | {"logit_bias": {"-5": 1}}),
    ("chat", lambda body: body | {"logit_bias": {"٥": 1}}),
    ("chat", lambda body: body | {"logit_bias": {"5": 1e9}}),
    ("chat", lambda body: body | {"stream_options": []}),
    ("chat", lambda body: body | {"stream": 1}),
    ("chat", lambda body: body | {"": 1}),
    ("chat", lambda body: body | {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("chat", lambda body: body | {f"x{i}": None for i in range(10**5)}),
    ("text", lambda body: body | {"prompt": []}),
    ("text", lambda body: body | {"prompt": ""} | {"prompt": [[]]}),
    ("text", lambda body: body | {"prompt": [-1]}),
    ("text", lambda body: body | {"prompt": [2**40]}),
    ("text", lambda body: body | {"prompt": [True]}),
    ("text", lambda body: body | {"prompt": [5, "x"]}),
    ("text", lambda body: body | {"prompt": ["x"] * 400, "n": 6}),
    ("text", lambda body: body | {"echo": True, "max_tokens": -1}),
    ("text", lambda body: body | {"logprobs": True}),
    ("text", lambda body: body | {"min_tokens": 5, "max_tokens": 4}),
    ("text", lambda body: body | {"stop": ["x" * 513]}),
    ("text", lambda body: body | {"stop_token_ids": [512]}),
    ("text", lambda body: body | {"messages": [SAID]}),
    ("text", lambda body: body | {"suffix": "x"}),
]


async def test_odd_requests_are_refused_and_the_server_serves_on() -> None:
    generate = Scripted(saying("hi"))
    right: dict[str, tuple[str, Body]] = {
        "chat": ("/v1/chat/completions", {"model": "tiny", "messages": [SAID]}),
        "text": ("/v1/completions", {"model": "tiny", "prompt": "x"}),
        "chat/": ("/v1/chat/completions/x", {"model": "tiny", "messages": [SAID]}),
    }
    async with (
        serving(make_gateway(generate)) as url,
        httpx.AsyncClient(base_url=url, verify=False, timeout=60.0) as client,
    ):
        for number, (kind, odd) in enumerate(WRONG):
            path, body = right[kind]
            response = await client.post(path, json=odd(body))
            assert 400 <= response.status_code < 500, f"{number}: {response.status_code} {response.text[:300]}"
            assert len(response.json()["error"]["message"]) < 500, f"{number}: the answer repeats what was sent"
        assert not generate.jobs, "what is refused starts nothing"
        for path, body in (right["chat"], right["text"]):
            assert (await client.post(path, json=body)).status_code == 200


DEEP = "DEEP"  # stands for nested lists
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": DEEP}'}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": DEEP}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
DONE = {"role": "tool", "tool_call_id": "1", "content": "x"}
OF_OLLAMA = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": DEEP}}}]}
CALLING: dict[str, Body] = {
    "/v1/chat/completions": {"messages": [SAID, {"role": "assistant", "tool_calls": [CALL]}, DONE]},
    "/v1/responses": {
        "input": [
            SAID,
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": DEEP}'},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ]
    },
    "/v1/messages": {
        "max_tokens": 4,
        "messages": [SAID, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
    },
    "/api/chat": {"stream": False, "messages": [SAID, OF_OLLAMA]},
}


@pytest.mark.parametrize("path", CALLING)
@pytest.mark.parametrize("levels", [100, 200, 300, 1000])
async def test_nested_arguments_are_served_or_refused(path: str, levels: int) -> None:
    gateway = make_gateway(Scripted(saying("hi")))
    gateway = with_card(gateway, max_model_len=8192)
    body = json.dumps({"model": "tiny"} | CALLING[path]).replace(f'"{DEEP}"', DEEP)
    body, headers = body.replace(DEEP, "[" * levels + "]" * levels), {"content-type": "application/json"}
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60.0) as client:
        response = await client.post(path, content=body, headers=headers)
    is_refused = levels > 100 and path in ("/v1/messages", "/api/chat")
    assert response.status_code == (400 if is_refused else 200), response.text[:300]
