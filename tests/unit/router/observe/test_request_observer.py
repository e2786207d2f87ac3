"""Every request that is admitted begins and ends once at each observer, however it ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from protos.errors import Overloaded, WorkerLost
from router.observe.request_observer import EndedRequest, ObservedRequest
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving


class Watcher:
    def __init__(self) -> None:
        self.begun: list[ObservedRequest] = []
        self.seen: asyncio.Queue[EndedRequest] = asyncio.Queue()

    def began(self, request: ObservedRequest) -> None:
        self.begun.append(request)

    def ended(self, ended: EndedRequest) -> None:
        self.seen.put_nowait(ended)


@pytest.mark.parametrize(
    ("steps", "outcome", "num_output"),
    [([], "ok", 3), ([lambda: WorkerLost("gone")], "worker_lost", 2), ([asyncio.Event], "cancelled", 2)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_observer_sees_how_a_request_ends(
    steps: list[Any], outcome: str, num_output: int, stream: bool
) -> None:
    generate = Scripted(
        lambda job: [*list(saying("ab", at_once=1)(job))[: 2 if steps else None], *[make() for make in steps]]
    )
    watcher = Watcher()
    gateway = replace(make_gateway(generate), observers=(watcher,))
    body = {"model": "tiny", "prompt": "hello", "stream": stream}
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        if outcome == "cancelled":
            await generate.began.wait()
            request.cancel()  # the client goes away
        await asyncio.gather(request, return_exceptions=True)
        ended = await asyncio.wait_for(watcher.seen.get(), timeout=30)
    assert ended.outcome == outcome
    assert ended.usage.completion_tokens == ended.request.counted.num_tokens
    assert ended.request.records[0].timestamps.ended_s is not None
    assert watcher.begun == [ended.request]
    assert watcher.seen.empty()
    if outcome != "cancelled":
        assert ended.usage.completion_tokens == num_output


async def test_a_request_that_no_worker_had_has_no_usage() -> None:
    watcher = Watcher()
    gateway = replace(make_gateway(Scripted(lambda job: [Overloaded("full")])), observers=(watcher,))
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
    assert (await watcher.seen.get()).usage.prompt_tokens == 0


async def test_an_observer_that_fails_costs_no_other_and_no_client(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def ended(self, ended: EndedRequest) -> None:
            raise ZeroDivisionError

    watcher = Watcher()
    gateway = replace(make_gateway(Scripted(saying("ab"))), observers=(Broken(), watcher))
    async with serving(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
    assert (answer.status_code, (await watcher.seen.get()).outcome) == (200, "ok")
    assert [record.levelname for record in caplog.records if "Broken" in record.message] == ["ERROR"]
