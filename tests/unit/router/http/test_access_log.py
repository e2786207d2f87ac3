"""Every request has a record in the access log, however it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from protos.errors import NoWorkers
from router.http.access_log import Access
from tests.unit.router.scripted import Crew, Scripted, make_gateway, saying, serving

BODY = {"model": "tiny", "prompt": "hello"}


class Kept(logging.Handler):
    """The access log of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.accesses: list[Access] = []
        self.turn = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, Access)
        self.accesses.append(record.msg)
        self.turn.set()


@pytest.fixture
def kept() -> Iterator[Kept]:
    logger, handler = logging.getLogger("baton.access"), Kept()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


async def test_every_answered_or_refused_request_has_a_line(kept: Kept) -> None:
    async with (
        serving(make_gateway(Scripted(saying("hi")))) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        whole = await client.post("/v1/completions", json=BODY)
        await client.post("/v1/completions", json=BODY | {"stream": True}, headers={"x-baton-request-id": "mine"})
        await client.post("/v1/completions", json=BODY | {"temperature": 9})
        await client.get("/no%0Asuch/path?key=secret")
        await client.head("/health")
    answered, streamed, refused, missing, head = kept.accesses
    usage = whole.json()["usage"]
    assert (answered.method, answered.path, answered.status) == ("POST", "/v1/completions", 200)
    assert answered.request == whole.headers["x-baton-request-id"]
    assert answered.client == "127.0.0.1"
    assert (answered.prompt_tokens, answered.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (streamed.status, streamed.request, streamed.output_tokens) == (200, "mine", answered.output_tokens)
    assert streamed.seconds > 0
    assert (refused.status, refused.outcome, refused.prompt_tokens) == (400, "invalid_request", None)
    assert (missing.path, missing.status) == ("/no%0Asuch/path", 404), "what belongs to nobody's log is left out"
    assert (head.method, head.status) == ("HEAD", 200)
    assert str(refused).startswith("POST /v1/completions 400 in 0.0")
    assert f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens" in str(answered)
    assert "prompt_tokens" not in refused.fields()


async def test_a_stream_that_fails_and_a_client_that_left_say_so(kept: Kept) -> None:
    steps: list[list[Any]] = [[NoWorkers("nobody")], [asyncio.Event()]]
    generate = Scripted(lambda job: steps.pop(0))
    async with serving(make_gateway(generate)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.post("/v1/completions", json=BODY | {"stream": True})
        generate.began.clear()
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
        await generate.began.wait()
        kept.turn.clear()
        asking.cancel()
        await kept.turn.wait()
    assert [(access.status, access.outcome) for access in kept.accesses] == [(503, "no_workers"), (499, "cancelled")]


async def test_a_stream_has_the_status_it_began_with_and_how_it_ended(kept: Kept) -> None:
    endings: list[Any] = [NoWorkers("nobody"), asyncio.Event()]
    generate = Scripted(lambda job: [*list(saying("hello there")(job))[:1], endings.pop(0)])
    asked = BODY | {"stream": True}
    async with serving(make_gateway(generate)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.post("/v1/completions", json=asked)
        kept.turn.clear()
        async with client.stream("POST", "/v1/completions", json=asked) as left:
            await anext(left.aiter_bytes())
        await kept.turn.wait()
    assert [(access.status, access.outcome) for access in kept.accesses] == [(200, "no_workers"), (200, "cancelled")]


async def test_polling_has_no_lines_unless_it_fails(kept: Kept) -> None:
    async with (
        serving(make_gateway(Scripted(saying("hi")))) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        for path in ("/ready", "/health", "/metrics", "/admin/status", "/admin/requests?limit=5"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/admin/requests?limit=x")).status_code == 400
        assert (await client.post("/admin/workers/none/drain")).status_code == 404
        await client.get("/v1/models")
    assert [(access.method, access.path) for access in kept.accesses] == [
        ("GET", "/admin/requests"), ("POST", "/admin/workers/none/drain"), ("GET", "/v1/models"),
    ]  # fmt: skip


async def test_a_probe_that_waits_for_workers_has_no_lines(kept: Kept) -> None:
    fleet = Crew()
    async with (
        serving(make_gateway(Scripted(saying("hi")), fleet=fleet)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        fleet.is_ready = False
        assert [(await client.get("/ready")).status_code for _ in range(3)] == [503] * 3
        assert (await client.get("/ready/not")).status_code == 404
    assert [(access.path, access.status) for access in kept.accesses] == [("/ready/not", 404)]


async def test_malformed_requests_have_a_line(kept: Kept) -> None:
    async with serving(make_gateway(Scripted(saying("hi")))) as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(b"GARBAGE\r\n\r\n")
        await reader.read()
        writer.close()
    assert [(access.method, access.path, access.status) for access in kept.accesses] == [("-", "-", 400)]


async def test_without_a_log_nothing_is_formatted() -> None:
    assert not logging.getLogger("baton.access").isEnabledFor(logging.INFO)
    async with (
        serving(make_gateway(Scripted(saying("hi")))) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
