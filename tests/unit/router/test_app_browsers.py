"""Browsers and proxies need permission across origins, and a sign of life while a prompt is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos.errors import NoWorkers
from router.auth.auth import AccessControl
from router.auth.tenants import hash_of
from tests.unit.router.scripted import Script, Scripted, make_gateway, saying, serving, talking

PAGE = "https://chat.example"
JSON = {"content-type": "application/json"}
PROMPT = {"model": "tiny", "prompt": "hello", "stream": True}


@asynccontextmanager
async def visiting(script: Script | None = None, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    gateway = make_gateway(Scripted(script or saying("hi")), **changes)
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        yield client


async def test_a_page_of_a_known_origin_may_ask() -> None:
    asking = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with visiting(cors_origins=PAGE) as client:
        may = await client.options("/v1/chat/completions", headers=asking)
        answer = await client.post("/v1/completions", json=PROMPT | {"stream": False}, headers={"origin": PAGE})
        refusal = await client.post("/v1/completions", json={}, headers={"origin": PAGE})
    assert may.status_code == 200
    assert may.headers["access-control-allow-headers"] == "authorization"
    for response in (may, answer, refusal):
        assert response.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-baton-request-id", "retry-after", "retry-after-ms"} <= set(exposed)
    assert refusal.status_code == 400


@pytest.mark.parametrize("origins", ["", "https://other.example"])
async def test_any_other_page_may_not(origins: str) -> None:
    async with visiting(cors_origins=origins) as client:
        answer = await client.post("/v1/completions", json=PROMPT, headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": PAGE, "content-type": "text/plain"}, 403),
        ({"origin": PAGE, "content-type": "application/json"}, 403),
        ({"origin": "null", "content-type": "text/plain"}, 403),
        ({"host": "evil.example:8000", "content-type": "application/json"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example", "content-type": "application/json"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json"}, 200),
        ({"host": "[::1]:8000", "origin": "http://[::1]:8000", "content-type": "application/json; charset=utf-8"}, 200),
        ({"host": "LOCALHOST", "content-type": "application/json"}, 200),
        ({"host": "baton.example", "content-type": "application/json"}, 200),
    ],
)
async def test_a_foreign_page_operates_nothing(headers: dict[str, str], status: int) -> None:
    body = b'{"name": "sql", "path": "/sql"}'
    async with visiting(hosts="baton.example") as client:
        operated = await client.post("/admin/adapters", content=body, headers=headers)
        asked = await client.post("/v1/completions", json=PROMPT | {"stream": False}, headers=headers | JSON)
        page = await client.get("/", headers={name: headers[name] for name in ("host",) if name in headers})
    assert operated.status_code == status
    assert asked.status_code == (403 if status == 403 else 200)
    assert page.status_code == (403 if "evil" in headers.get("host", "") else 200)


async def test_with_keys_a_gateway_has_any_name(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'admin_keys = ["{hash_of("sk-admin")}"]\n[tenants.acme]\nkeys = ["{hash_of("sk-acme")}"]\n')
    headers = {"host": "baton.example", "origin": PAGE, "authorization": "Bearer sk-acme"}
    async with visiting(access=AccessControl(path)) as client:
        assert (await client.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200


async def test_comments_precede_the_answer_during_prefill() -> None:
    gate, say = asyncio.Event(), saying("hi")
    async with visiting(lambda job: [gate, *say(job)], keep_alive_s=0.1) as client:
        lines = []
        async with client.stream("POST", "/v1/completions", json=PROMPT) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": the answer is on its way") == 3:
                    gate.set()
    assert lines[0].startswith(": ")
    assert lines[-2] == "data: [DONE]"


async def test_openais_client_passes_over_comments() -> None:
    gate, say = asyncio.Event(), saying("hi")

    def script(job: Any) -> Any:
        asyncio.get_running_loop().call_later(0.05, gate.set)
        return [gate, *say(job)]

    async with talking(script, keep_alive_s=0.1) as (client, _):
        stream = await client.completions.create(model="tiny", prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hi"


async def test_after_a_comment_a_failure_is_an_event() -> None:
    gate = asyncio.Event()
    async with visiting(lambda job: [gate, NoWorkers("nobody is there")], keep_alive_s=0.1) as client:
        lines = []
        async with client.stream("POST", "/v1/completions", json=PROMPT) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                gate.set()
    assert response.status_code == 200
    assert "nobody is there" in next(line for line in lines if line.startswith("data: "))
    assert "data: [DONE]" not in lines
