"""/openapi.json holds: every route is in it, bodies are what it says, and so are the answers, errors among them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from jsonschema import Draft202012Validator

from protos.errors import DeadlineExceeded, NoWorkers, Overloaded
from protos.values import WorkerLoad
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.fleet.worker import WorkerState, WorkerStatus
from router.openapi import OPERATIONS
from router.text.chat_template import ChatTemplate
from router.tools.formats import ToolFormat
from tests.unit.router.scripted import Crew, Script, Scripted, Worker, make_gateway, saying, serving

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
RESPONSES = {"model": "tiny", "input": "hello"}
MESSAGES = CHAT | {"max_tokens": 9}
EVERYTHING = {"n": 2, "prompt_logprobs": 1, "return_token_ids": True}


class Absent(dict[str, str]):
    """Values of a path's parameters: what is not given does not exist."""

    def __missing__(self, name: str) -> str:
        return "nobody"


class Visitor:
    """A client that holds each answer against the document, as it is before it is looked at further."""

    def __init__(self, http: httpx.AsyncClient, document: dict[str, Any]) -> None:
        self._http = http
        self.document = document

    async def ask(self, method: str, url: str, *, path: str = "", **given: Any) -> httpx.Response:
        """`path`: the one of the document, where it has parameters."""
        response = await self._http.request(method, url, **given)
        operation = self.document["paths"][path or url][method.lower()]
        told = operation["responses"][str(response.status_code)]
        kind = response.headers["content-type"].partition(";")[0]
        schema = told["content"][kind]["schema"]
        if kind == "application/json":
            self.validator(schema).validate(response.json())
        needed = {name for name, header in told["headers"].items() if header.get("required")}
        assert needed <= response.headers.keys()
        return response

    def validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        return Draft202012Validator(schema | {"components": self.document["components"]})

    def takes(self, body: str, value: Any) -> bool:
        return bool(self.validator({"$ref": f"#/components/schemas/{body}"}).is_valid(value))


@asynccontextmanager
async def visiting(script: Script | None = None, **changes: Any) -> AsyncIterator[Visitor]:
    gateway = make_gateway(Scripted(script or saying("hi")), **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as http:
        yield Visitor(http, (await http.get("/openapi.json")).json())


async def test_every_route_is_described_and_nothing_else() -> None:
    async with visiting() as visitor:
        paths = visitor.document["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == OPERATIONS.keys()
    for schema in visitor.document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | EVERYTHING | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | EVERYTHING | {"logprobs": 2, "echo": True}),
    ("/v1/completions", COMPLETION | {"logprobs": 0}),
    ("/v1/completions", COMPLETION | {"stream": True}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", MESSAGES | {"stream": True}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/responses", RESPONSES),
    ("/v1/responses/input_tokens", RESPONSES),
    ("/api/chat", CHAT),
    ("/api/chat", CHAT | {"stream": False}),
    ("/api/chat", CHAT | {"messages": []}),
    ("/api/generate", COMPLETION),
    ("/api/generate", COMPLETION | {"stream": False}),
    ("/api/show", {"model": "tiny"}),
    ("/v1/responses", RESPONSES | {"stream": True}),
    ("/v1/responses", RESPONSES | {"max_output_tokens": 1, "instructions": "x", "metadata": {"a": "b"}}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [1, 2]}),
)


async def test_answers_are_as_described() -> None:
    async with visiting() as visitor:
        for path, body in TAKEN:
            assert (await visitor.ask("POST", path, json=body)).status_code == 200, body


async def test_what_is_asked_of_a_gateway_is_as_described() -> None:
    worker = WorkerStatus(
        worker_id="decode-0", address="127.0.0.1:7000", state=WorkerState.READY, reason="", info=None,
        load=WorkerLoad(), num_routed=1, num_cached_blocks=0,
    )  # fmt: skip
    async with visiting(fleet=Crew(cast("Worker", worker))) as visitor:
        await visitor.ask("POST", "/v1/completions", json=COMPLETION, headers={"x-baton-request-id": "trace-1"})
        for path in (
            "/",
            "/v1/models",
            "/api/tags",
            "/api/version",
            "/health",
            "/ready",
            "/metrics",
            "/admin/status",
            "/admin/kv",
            "/admin/shadows",
        ):
            assert (await visitor.ask("GET", path)).status_code == 200
        assert (await visitor.ask("GET", "/v1/models/tiny", path="/v1/models/{name}")).status_code == 200
        drained = await visitor.ask("POST", "/admin/workers/decode-0/drain", path="/admin/workers/{worker_id}/drain")
        assert drained.status_code == 202
        assert (await visitor.ask("GET", "/admin/requests")).json()["requests"]
        for path in ("/admin/requests/{name}", "/admin/requests/{name}/cache"):
            assert (await visitor.ask("GET", path.format(name="trace-1"), path=path)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "no_room", "no_worker"),
    [
        ("/v1/chat/completions", CHAT, 429, 503),
        ("/v1/completions", COMPLETION, 429, 503),
        ("/v1/messages", MESSAGES, 529, 529),
        ("/v1/responses", RESPONSES, 429, 503),
        ("/api/chat", CHAT, 429, 503),
    ],
)
async def test_failures_are_as_described(path: str, body: dict[str, Any], no_room: int, no_worker: int) -> None:
    failures = {
        Overloaded("too busy", retry_after_s=2): no_room,
        RuntimeError("a bug of ours"): 500,
        NoWorkers("no decode worker"): no_worker,
        DeadlineExceeded("too late"): 504,
    }
    left = list(failures)
    async with visiting(lambda job: [left.pop(0)]) as visitor:
        for status in failures.values():
            assert (await visitor.ask("POST", path, json=body)).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/api/chat",
        "/tokenize",
        "/detokenize",
    ],
)  # fmt: skip
async def test_refusals_are_as_described(path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/messages": MESSAGES,
        "/v1/responses": RESPONSES,
        "/api/chat": CHAT,
        "/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [1]},
    }  # fmt: skip
    async with visiting(max_body_bytes=1000) as visitor:
        answers = [
            await visitor.ask("POST", path, json={}),
            await visitor.ask("POST", path, json=bodies[path] | {"model": "other"}),
            await visitor.ask("POST", path, content=b"x" * 1001),
            await visitor.ask("POST", path, json=bodies[path], headers={"content-encoding": "gzip"}),
            await visitor.ask("POST", path, json=bodies[path], headers={"x-long": "x" * 2**16}),
        ]
    assert [answer.status_code for answer in answers] == [400, 404, 413, 415, 431]


async def test_what_is_not_there_or_not_ready_is_as_described() -> None:
    async with visiting() as visitor:
        for method, path in OPERATIONS:
            if "{" in path:
                url = path.format_map(Absent())
                assert (await visitor.ask(method.upper(), url, path=path)).status_code == 404
        assert (await visitor.ask("GET", "/admin/requests", params={"limit": "0"})).status_code == 400


async def test_keys_are_as_described(tmp_path: Path) -> None:
    path, key = tmp_path / "tenants.toml", "sk-baton-acme"
    path.write_text(f'admin_keys = ["{hash_of("sk-baton-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of(key)}"]\n')
    bearing = {"authorization": f"Bearer {key}"}
    async with visiting(access=AccessControl(path)) as visitor:
        for (method, path_), operation in OPERATIONS.items():
            described = visitor.document["paths"][path_][method]
            assert described.get("security") == ([{"key": []}] if 401 in operation.errors else None)
            url = path_.format_map(Absent(name="tiny", worker_id="decode-0"))
            if 401 in operation.errors:
                assert (await visitor.ask(method.upper(), url, path=path_)).status_code == 401
            if 403 in operation.errors:
                assert (await visitor.ask(method.upper(), url, path=path_, headers=bearing)).status_code == 403
    async with visiting() as visitor:
        assert visitor.document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {}]


CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 2.1}, {"temperature": 2}, {"top_p": None}, {"n": 0}, {"model": "other"}, {"user": "me"},
    {"user": 5}, {"temprature": 1}, {"stop": "x"}, {"stop": ["x", ""]}, {"stop": ["x"] * 33}, {"stop": []},
    {"stream_options": {}}, {"stream_options": {}, "stream": True}, {"stream_options": None},
    {"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 1, "stream": False}, {"max_tokens": 0},
    {"max_tokens": 1}, {"stop_token_ids": [512]}, {"stop_token_ids": [511]}, {"logit_bias": {"5": 100}},
    {"stop_token_ids": [5.0]}, {"stop_token_ids": [5.5]}, {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {}}, {"structured_outputs": {"choice": []}}, {"structured_outputs": {"json": "{}"}},
    {"structured_outputs": {"json": 5}}, {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
    {"logit_bias": {"5": 101}}, {"logit_bias": {"five": 1}}, {"logit_bias": {"511": 1}}, {"logit_bias": {"512": 1}},
    {"logit_bias": {"499": 1}}, {"logit_bias": {"1000": 1}}, {"max_ttft_ms": 0}, {"cache_salt": ""},
)  # fmt: skip


@pytest.mark.parametrize(("path", "least"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
async def test_a_body_is_taken_if_and_only_if_it_is_as_described(path: str, least: dict[str, Any]) -> None:
    kind = OPERATIONS["post", path].body
    assert kind is not None
    async with visiting() as visitor:
        for changes in CHANGES:
            answer = await visitor.ask("POST", path, json=least | changes)
            assert (answer.status_code == 200) == visitor.takes(kind.__name__, least | changes), changes


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
TOOL = {"type": "function", "function": {"name": "f"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
CHAT_CHANGES: tuple[dict[str, Any], ...] = (
    {"tools": [TOOL]}, {"tools": []}, {"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tool_choice": "none"},
    {"tools": [TOOL] * 513}, {"tools": [{"type": "custom"}]}, {"response_format": {"type": "text"}, "ignore_eos": True},
    {"response_format": {"type": "json_schema"}}, {"response_format": FORM}, {"response_format": None},
    {"response_format": FORM, "ignore_eos": True}, {"messages": [CALLED]}, {"messages": [CALLED | {"role": "user"}]},
    {"messages": [{"role": "assistant"}]}, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
    {"structured_outputs": {"regex": "a"}, "response_format": FORM},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}, "tools": []},
    {"structured_outputs": {"regex": "a"}, "tools": [TOOL]},
)  # fmt: skip


@pytest.mark.parametrize("shows", [True, False])
async def test_tools_and_forms_are_taken_if_and_only_if_they_are_described(shows: bool) -> None:
    template = ChatTemplate("hello{{ tools }}" if shows else "hello")
    async with visiting(template=template, tool_format=ToolFormat.HERMES) as visitor:
        hidden = {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "none"}
        for changes in (*CHAT_CHANGES, *([hidden] if shows else [])):
            answer = await visitor.ask("POST", "/v1/chat/completions", json=CHAT | changes)
            assert (answer.status_code == 200) == visitor.takes("ChatBody", CHAT | changes), changes


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"tools": [{}]}),
    ("/v1/chat/completions", CHAT | {"messages": []}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_obfuscation": 0}}),
    ("/v1/completions", COMPLETION | {"prompt": []}),
    ("/v1/completions", COMPLETION | {"prompt": [512]}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "hello", "messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [512]}),
)


async def test_what_is_accepted_is_described() -> None:
    """`make fuzz` found each of them."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": None}
    async with visiting() as visitor:
        for path, body in (
            ("/v1/completions", COMPLETION | {"stream": True, "best_of": None}),
            ("/v1/chat/completions", CHAT | {"logprobs": False, "top_logprobs": None}),
            ("/v1/messages", MESSAGES | {"messages": [{"role": "user", "content": [result]}]}),
        ):
            kind = OPERATIONS["post", path].body
            assert kind is not None
            assert (await visitor.ask("POST", path, json=body)).status_code == 200, body
            assert visitor.takes(kind.__name__, body), body


async def test_what_is_refused_is_not_described() -> None:
    async with visiting() as visitor:
        for path, body in WRONG:
            kind = OPERATIONS["post", path].body
            assert kind is not None
            assert (await visitor.ask("POST", path, json=body)).status_code == 400, body
            assert not visitor.takes(kind.__name__, body), body


async def test_roles_that_the_template_refuses_are_not_described() -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' or (m.role == 'assistant' and loop.first) %}"
    source += "{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
    async with visiting(template=ChatTemplate(source)) as visitor:
        described = visitor.document["components"]["schemas"]["ChatMessage"]["properties"]["role"]["enum"]
    assert described == ["system", "developer", "user", "assistant"]


async def test_a_method_that_is_not_answered_is_told_all_that_are() -> None:
    async with visiting() as visitor:
        for path in visitor.document["paths"]:
            url = path.format_map(Absent(name="tiny", worker_id="decode-0"))
            refused = await visitor._http.put(url)
            assert refused.status_code == 405
            answered = {method.upper() for method in visitor.document["paths"][path]}
            assert answered <= set(refused.headers["allow"].split(", "))
