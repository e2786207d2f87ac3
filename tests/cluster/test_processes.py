"""`baton gateway --processes 2` before one toy worker: two gateways that share a port and a private Redis."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli.serve import DEMO
from tests.cluster.deployed import Deployed
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, Gate, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

pytestmark = pytest.mark.cluster

ASKED = {"model": "demo", "prompt": list(range(8 * BLOCK)), "max_tokens": 4, "ignore_eos": True}


async def get(url: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        return await client.get(path)


async def complete(url: str, name: str) -> int:
    """The cached tokens of its prompt."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        answer = await client.post("/v1/completions", json=ASKED, headers={"x-baton-request-id": name})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until(url: str, path: str, holds: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if holds((await get(url, path)).json()):
                    return
            except httpx.HTTPError:
                pass  # its process has just ended
            await asyncio.sleep(0.05)


async def answered(url: str) -> float:
    """The completions answered by the process at its own port."""
    series = r'^baton_requests_total{endpoint="completions",model="demo",outcome="ok"} (\S+)$'
    return sum(map(float, re.findall(series, (await get(url, "/metrics")).text, re.MULTILINE)))


def redis_of(baton: Deployed) -> set[int]:
    """Its command line and environment are a title, so `processes` does not find it."""
    children = Path(f"/proc/{baton.process.pid}/task/{baton.process.pid}/children").read_text().split()
    return {int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "redis-server\n"}


def running(baton: Deployed, program: str) -> set[int]:
    return {pid for pid, command in baton.processes().items() if program in command}


async def test_two_processes_share_a_port_and_one_may_die(
    deploy: Callable[..., Deployed], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(ToyRunner(WEIGHT, BLOCK, VOCAB))
    worker = Worker(parts_of(gate))
    address = (await worker.start("127.0.0.1")).address
    flags = ("--model", DEMO["model"], "--served-name", "demo", "--port", "0", "--grpc-port", "0", "--processes", "2")
    baton = deploy("gateway", *flags, "--set", "supervision.health_period_s=0.2", "--worker", address)
    try:
        await asyncio.to_thread(baton.wait_for, "every gateway process is ready")
        first, second = await asyncio.to_thread(lambda: baton.urls)
        for number in range(3):
            await complete(baton.url, f"r{number}")
        for own in (first, second):
            await until(own, "/admin/status", lambda told: told["workers"][0]["num_cached_blocks"])
            assert await complete(own, f"at-{own[-5:]}"), "each process hears what the worker has"
        assert await answered(first) + await answered(second) == 5
        refused = await get(baton.url, "/metrics")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        page = await get(baton.url, "/")
        assert page.headers["location"] == f"{first}/"
        assert (await get(first, "/")).status_code == 200
        assert (await get(first, f"/admin/requests/at-{first[-5:]}")).status_code == 200
        assert (await get(second, f"/admin/requests/at-{first[-5:]}")).status_code == 404

        pids = running(baton, "cluster.gateway.replica")
        async with streaming(gate, first, second) as answers:
            os.kill(max(pids), signal.SIGKILL)
            async with asyncio.timeout(60):
                while "has disconnected: aborting its 1 request" not in caplog.text:  # noqa: ASYNC110 - logged on any thread
                    await asyncio.sleep(0.02)
            gate.open.set()
            ended = await asyncio.gather(*answers, return_exceptions=True)
            [whole] = [answer for answer in ended if isinstance(answer, bytes)]
            assert whole.endswith(b"data: [DONE]\n\n"), "that of the other process goes on"
            [cut] = [answer for answer in ended if not isinstance(answer, bytes)]
            assert isinstance(cut, httpx.HTTPError)
        idle = ("num_running", "num_waiting", "num_tickets")
        for own in (first, second):
            await until(own, "/ready", lambda told: told["ready"])
            await until(own, "/admin/status", lambda told: not any(told["workers"][0]["load"][name] for name in idle))

        await outlives_a_frozen_process_and_redis(baton, first, second)
        [server] = redis_of(baton)
        async with streaming(gate, first) as [answer]:
            stopping = asyncio.create_task(asyncio.to_thread(baton.stop, signal.SIGTERM))
            await asyncio.to_thread(baton.wait_for, "^stopping")
            gate.open.set()
            assert (await answer).endswith(b"data: [DONE]\n\n"), "what runs is finished first"
        assert await stopping == 0, baton.log
        assert baton.processes() == {}
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)
    finally:
        gate.open.set()
        await worker.stop()


async def outlives_a_frozen_process_and_redis(baton: Deployed, *urls: str) -> None:
    frozen = max(running(baton, "cluster.gateway.replica"))
    os.kill(frozen, signal.SIGSTOP)
    baton.wait_until(lambda: len(running(baton, "cluster.gateway.replica") - {frozen}) == 2, timeout_s=60.0)
    [server] = redis_of(baton)
    os.kill(server, signal.SIGKILL)
    await complete(urls[0], "without-redis")
    baton.wait_until(lambda: bool(redis_of(baton) - {server}))
    for own in urls:
        await until(own, "/ready", lambda told: told["ready"] and not told["degraded"])


@asynccontextmanager
async def streaming(gate: Gate, *urls: str) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Answers of processes that are under way, and get no further before the gate is opened."""
    gate.open.clear()
    gate.entered.clear()
    begun = [asyncio.Event() for _ in urls]

    async def read(url: str, has_begun: asyncio.Event) -> bytes:
        async with (
            httpx.AsyncClient(base_url=url, timeout=60.0) as client,
            client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as answer,
        ):
            has_begun.set()
            return await answer.aread()

    reading = [asyncio.create_task(read(url, has_begun)) for url, has_begun in zip(urls, begun, strict=True)]
    await asyncio.to_thread(gate.entered.wait, 60)
    async with asyncio.timeout(60):
        await asyncio.gather(*(has_begun.wait() for has_begun in begun))
    yield reading
