"""`baton gateway --processes 2` before one toy worker: one gateway to its clients, also when a process is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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


class Client:
    """Every request goes over a connection of its own, so that processes take turns."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as client:
            return await client.get(path)

    async def complete(self, name: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as client:
            return await client.post("/v1/completions", json=ASKED, headers={"x-baton-request-id": name})

    async def until(self, path: str, holds: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(60):
            while not holds(told := (await self.get(path)).json()):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.05)
        return told

    async def counts(self, name: str, labels: str = "") -> dict[int, float]:
        """Of completions, by process."""
        series = rf'^baton_{name}{{endpoint="completions",model="demo"{labels},process="(\d)"}} (\S+)$'
        found = re.findall(series, (await self.get("/metrics")).text, re.MULTILINE)
        return {int(process): float(count) for process, count in found}


async def test_two_processes_are_one_gateway_and_one_may_die(
    deploy: Callable[..., Deployed], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(ToyRunner(WEIGHT, BLOCK, VOCAB))
    worker = Worker(parts_of(gate))
    address = (await worker.start("127.0.0.1")).address
    flags = ("--model", DEMO["model"], "--served-name", "demo", "--port", "0", "--processes", "2", "--worker", address)
    baton = deploy("gateway", *flags)
    try:
        await asyncio.to_thread(baton.wait_for, "every gateway process is ready", timeout_s=100.0)
        client = Client(baton.url)
        assert (await client.complete("first")).status_code == 200
        for _ in range(2):  # they take turns
            await client.until("/admin/status", lambda told: told["workers"][0]["num_cached_blocks"])
        for number in range(4):
            cached = (await client.complete(f"r{number}")).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached, "each process hears what the worker has"
            for _ in range(2):
                assert (await client.get(f"/admin/requests/r{number}")).status_code == 200
        answered = await client.counts("requests_total", r',outcome="ok"')
        assert (sum(answered.values()), len(answered)) == (5, 2)

        async with streaming(baton, gate, 2) as answers:
            async with asyncio.timeout(60):
                while (await client.counts("requests_in_flight")) != {0: 1, 1: 1}:  # noqa: ASYNC110 - asked over HTTP
                    await asyncio.sleep(0.02)
            statuses = (await client.get("/admin/status")).json()["processes"]
            os.kill(next(one["pid"] for one in statuses if one["number"] == 1), signal.SIGKILL)
            told = await client.until("/ready", lambda told: told["degraded"])
            assert (told["ready"], "gateway process 1" in told["degraded"]) == (True, True)
            async with asyncio.timeout(60):
                while "has disconnected: aborting its 1 request" not in caplog.text:  # noqa: ASYNC110 - logged on any thread
                    await asyncio.sleep(0.02)
            gate.open.set()
            ended = await asyncio.gather(*answers, return_exceptions=True)
            [whole] = [one for one in ended if isinstance(one, bytes)]
            assert whole.endswith(b"data: [DONE]\n\n"), "that of the other process goes on"
            [cut] = [one for one in ended if not isinstance(one, bytes)]
            assert isinstance(cut, httpx.HTTPError)
        idle = ("num_running", "num_waiting", "num_tickets")
        await client.until("/admin/status", lambda told: not any(told["workers"][0]["load"][name] for name in idle))
        await client.until("/ready", lambda told: not told["degraded"])

        async with streaming(baton, gate) as [answer]:
            stopping = asyncio.create_task(asyncio.to_thread(baton.stop, signal.SIGTERM))
            await asyncio.to_thread(baton.wait_for, "^stopping")
            gate.open.set()
            assert (await answer).endswith(b"data: [DONE]\n\n"), "what runs is finished first"
        assert await stopping == 0, baton.log
        assert baton.processes() == {}
    finally:
        gate.open.set()
        await worker.stop()


@asynccontextmanager
async def streaming(baton: Deployed, gate: Gate, count: int = 1) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Answers, of which one is under way, and which get no further before the gate is opened."""
    gate.open.clear()
    gate.entered.clear()

    async def read() -> bytes:
        async with httpx.AsyncClient(base_url=baton.url, timeout=60.0) as client:
            return (await client.post("/v1/completions", json=ASKED | {"stream": True})).content

    reading = [asyncio.create_task(read()) for _ in range(count)]
    await asyncio.to_thread(gate.entered.wait, 60)
    yield reading
