"""/openapi.json holds: every endpoint is in it, bodies that are accepted are described, and errors have their form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from protos.errors import DeadlineExceeded, NoWorkers, Overloaded
from router.app import create_app
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from router.text.chat_template import ChatTemplate
from router.text.tools.formats import ToolFormat
from tests.unit.router.scripted import Script, Scripted, make_gateway, saying, serving

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
RESPONSES = {"model": "tiny", "input": "hello"}
MESSAGES = CHAT | {"max_tokens": 9}
TOKENIZE = {"prompt": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES,
    "/api/chat": CHAT, "/tokenize": TOKENIZE, "/detokenize": {"tokens": [1]},
}  # fmt: skip


class Absent(dict[str, str]):
    """Values of a path's parameters: what is not given does not exist."""

    def __missing__(self, name: str) -> str:
        return "nobody"


class Visitor:
    """A client that holds each error against the document."""

    def __init__(self, http: httpx.AsyncClient, document: dict[str, Any]) -> None:
        self.http = http
        self.document = document

    async def ask(self, method: str, url: str, *, path: str = "", **given: Any) -> httpx.Response:
        """`path`: the document's, if it has parameters."""
        response = await self.http.request(method, url, **given)
        if response.is_error:
            failed = self.document["paths"][path or url][method.lower()]["responses"]["default"]
            self.validator(failed["content"]["application/json"]["schema"]).validate(response.json())
        return response

    def validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        return Draft202012Validator(schema | {"components": self.document["components"]})

    def takes(self, path: str, value: Any) -> bool:
        content = self.document["paths"][path]["post"]["requestBody"]["content"]
        return bool(self.validator(content["application/json"]["schema"]).is_valid(value))


@asynccontextmanager
async def visiting(script: Script | None = None, **changes: Any) -> AsyncIterator[Visitor]:
    gateway = make_gateway(Scripted(script or saying("hi")), **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as http:
        yield Visitor(http, (await http.get("/openapi.json")).json())


async def test_every_route_is_described_and_nothing_else() -> None:
    async with visiting() as visitor:
        paths = visitor.document["paths"]
    assert "#/$defs" not in str(visitor.document)
    routes = [route for route in create_app(make_gateway(Scripted(saying("hi")))).routes if isinstance(route, Route)]
    methods = {(route.path_format, method) for route in routes for method in (route.methods or set()) - {"HEAD"}}
    described = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    assert methods == described | {("/openapi.json", "GET")}
    ids = [method["operationId"] for methods in paths.values() for method in methods.values()]
    assert len(ids) == len(set(ids))
    for schema in visitor.document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "no_room", "no_worker"),
    [
        ("/v1/chat/completions", 429, 503),
        ("/v1/completions", 429, 503),
        ("/v1/messages", 529, 529),
        ("/v1/responses", 429, 503),
        ("/api/chat", 429, 503),
    ],
)
async def test_failures_are_as_described(path: str, no_room: int, no_worker: int) -> None:
    failures = {
        Overloaded("too busy", retry_after_s=2): no_room,
        RuntimeError("a bug of ours"): 500,
        NoWorkers("no decode worker"): no_worker,
        DeadlineExceeded("too late"): 504,
    }
    left = list(failures)
    async with visiting(lambda job: [left.pop(0)]) as visitor:
        answers = [await visitor.ask("POST", path, json=BODIES[path]) for _ in failures]
    assert [answer.status_code for answer in answers] == list(failures.values())
    assert "retry-after" in answers[0].headers


@pytest.mark.parametrize("path", BODIES)
async def test_refusals_are_as_described(path: str) -> None:
    body = BODIES[path]
    async with visiting(max_body_bytes=1024) as visitor:
        answers = [
            await visitor.ask("POST", path, json={}),
            await visitor.ask("POST", path, json=body | {"model": "other"}),
            await visitor.ask("POST", path, content=b"x" * 1025),
            await visitor.ask("POST", path, json=body, headers={"content-encoding": "gzip"}),
            await visitor.ask("POST", path, json=body, headers={"x-long": "x" * 2**16}),
        ]
    assert [answer.status_code for answer in answers] == [400, 404, 413, 415, 431]


async def test_missing_paths_answer_as_described() -> None:
    async with visiting() as visitor:
        for path, methods in visitor.document["paths"].items():
            for method in methods if "{" in path else ():
                answer = await visitor.ask(method.upper(), path.format_map(Absent()), path=path)
                assert answer.status_code == 404
        assert (await visitor.ask("GET", "/admin/requests", params={"limit": "0"})).status_code == 400


async def test_keys_are_as_described(tmp_path: Path) -> None:
    path, key = tmp_path / "tenants.toml", "sk-baton-acme"
    path.write_text(f'admin_keys = ["{hash_of("sk-baton-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of(key)}"]\n')
    bearing = {"authorization": f"Bearer {key}"}
    async with visiting(access=AccessControl(path)) as visitor:
        endpoints = [(path, *item) for path, methods in visitor.document["paths"].items() for item in methods.items()]
        for path_, method, described in endpoints:
            url = path_.format_map(Absent(name="tiny", worker_id="decode-0"))
            answer = await visitor.http.request(method.upper(), url)
            if "security" in described:
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path_
            else:
                assert answer.status_code == 200, path_
            if path_.startswith(("/admin", "/v1/organization")):
                answer = await visitor.ask(method.upper(), url, path=path_, headers=bearing)
                assert answer.status_code == 403
    async with visiting() as visitor:
        assert visitor.document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {}]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
TOOL = {"type": "function", "function": {"name": "f"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": None}
CHANGES: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 2}, {"top_p": None}, {"user": "me"}, {"stop": "x"}, {"stop": []}, {"stream_options": None},
    {"stream_options": {}, "stream": True}, {"prompt_logprobs": 1, "stream": False}, {"max_tokens": 1},
    {"stop_token_ids": [511]}, {"stop_token_ids": [5.0]}, {"logit_bias": {"5": 100}}, {"logit_bias": {"511": 1}},
    {"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"json": "{}"}},
    {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
)  # fmt: skip
CHAT_CHANGES: tuple[dict[str, Any], ...] = (
    {"tools": [TOOL]}, {"tools": []}, {"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tool_choice": "none"},
    {"response_format": {"type": "text"}, "ignore_eos": True}, {"response_format": FORM}, {"response_format": None},
    {"messages": [CALLED]}, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}, "tools": []},
    {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "none"},
    {"logprobs": False, "top_logprobs": None},
)  # fmt: skip
TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    *((path, BODIES[path] | changes) for path in ("/v1/chat/completions", "/v1/completions") for changes in CHANGES),
    *(("/v1/chat/completions", CHAT | changes) for changes in CHAT_CHANGES),
    ("/v1/completions", COMPLETION | {"stream": True, "best_of": None}),
    ("/v1/messages", MESSAGES | {"messages": [{"role": "user", "content": [RESULT]}]}),
)


async def test_accepted_requests_are_described() -> None:
    """`make fuzz` found the last ones."""
    async with visiting(template=ChatTemplate("hello{{ tools }}"), tool_format=ToolFormat.HERMES) as visitor:
        for path, body in TAKEN:
            assert (await visitor.ask("POST", path, json=body)).status_code == 200, body
            assert visitor.takes(path, body), body


OUT_OF_RANGE: tuple[dict[str, Any], ...] = (
    {"temperature": 2.1}, {"n": 0}, {"model": "other"}, {"user": 5}, {"temprature": 1}, {"stop": ["x", ""]},
    {"stop": ["x"] * 33}, {"stop_token_ids": [5.5]}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": 5}}, {"logit_bias": {"5": 101}}, {"logit_bias": {"five": 1}}, {"max_ttft_ms": 0},
    {"cache_salt": ""},
)  # fmt: skip
WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    *((path, parameter) for path in ("/v1/chat/completions", "/v1/completions") for parameter in OUT_OF_RANGE),
    ("/v1/chat/completions", {"tools": [{}]}),
    ("/v1/chat/completions", {"tools": [TOOL] * 513}),
    ("/v1/chat/completions", {"tools": [{"type": "custom"}]}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"include_obfuscation": 0}}),
    ("/tokenize", {"prompt": 5}),
)


async def test_values_out_of_range_are_not_described() -> None:
    async with visiting() as visitor:
        for path, changes in WRONG:
            assert (await visitor.ask("POST", path, json=BODIES[path] | changes)).status_code in (400, 404), changes
            assert not visitor.takes(path, BODIES[path] | changes), changes


async def test_a_wrong_method_lists_the_allowed_ones() -> None:
    async with visiting() as visitor:
        for path in visitor.document["paths"]:
            url = path.format_map(Absent(name="tiny", worker_id="decode-0"))
            refused = await visitor.http.put(url)
            assert refused.status_code == 405
            answered = {method.upper() for method in visitor.document["paths"][path]}
            assert answered <= set(refused.headers["allow"].split(", "))
