"""A gateway alone in front of a toy worker hangs, continues, and is killed: the worker frees what it had asked for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from cluster.cli.serve import DEMO
from tests.cluster.deployed import Deployed
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, Gate, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

pytestmark = pytest.mark.cluster

PATIENCE_S = 60.0
ASKED = {"model": "demo", "prompt": list(range(8 * BLOCK)), "max_tokens": 4, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def asking(baton: Deployed, gate: Gate) -> AsyncIterator[asyncio.Task[bytes]]:
    """An answer that is under way, and gets no further before the gate is opened."""
    gate.open.clear()
    gate.entered.clear()

    async def read() -> bytes:
        async with httpx.AsyncClient(base_url=baton.url, timeout=PATIENCE_S) as client:
            return (await client.post("/v1/completions", json=ASKED)).content

    reading = asyncio.create_task(read())
    await asyncio.to_thread(gate.entered.wait, PATIENCE_S)
    try:
        yield reading
    finally:
        gate.open.set()
        with suppress(httpx.HTTPError):
            await reading


async def freed(caplog: pytest.LogCaptureFixture, *, times: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while caplog.text.count("has disconnected: aborting its 1 request") < times:  # noqa: ASYNC110 - on any thread
            await asyncio.sleep(0.02)


async def test_reservations_of_a_dead_or_hung_gateway_are_freed(
    deploy: Callable[..., Deployed], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(ToyRunner(WEIGHT, BLOCK, VOCAB))
    parts = parts_of(gate)
    worker = Worker(parts)
    address = (await worker.start("127.0.0.1")).address
    baton = deploy("gateway", "--model", DEMO["model"], "--served-name", "demo", "--port", "0", "--worker", address)
    try:
        await asyncio.to_thread(baton.wait_for, "is ready$")
        async with asking(baton, gate) as answer:
            os.kill(baton.process.pid, signal.SIGSTOP)  # its connections stay open: only silence tells
            await freed(caplog, times=1)
            os.kill(baton.process.pid, signal.SIGCONT)
            gate.open.set()
            assert (await answer).endswith(b"data: [DONE]\n\n"), "asked for again by a gateway that is there again"
            async with httpx.AsyncClient(base_url=baton.url) as client:
                measured = (await client.get("/metrics")).text
            losses = [line for line in measured.splitlines() if line.startswith("baton_pool_losses_total{")]
            assert losses
            assert all(line.endswith(" 0.0") for line in losses), "the gateway was silent, not the worker"
        async with asking(baton, gate):
            os.kill(baton.process.pid, signal.SIGKILL)
            await freed(caplog, times=2)
        async with asyncio.timeout(PATIENCE_S):
            while parts.engine.has_work():  # noqa: ASYNC110 - on another thread
                await asyncio.sleep(0.02)
        parts.engine.assert_idle()
    finally:
        gate.open.set()
        await worker.stop()
