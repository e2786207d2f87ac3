"""A worker that is stopped without a word (its connection stands) is noticed by its silence, and met again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from protos.errors import WorkerLost
from router.fleet.member import WorkerState
from tests.unit.router.fake_cluster import Cluster, job

WORKER = """
import asyncio
from protos.values import WorkerRole
from tests.unit.router.fake_worker import FakeWorker

async def main():
    worker = FakeWorker("c0", WorkerRole.COLOCATED, {})
    worker.pause_after = 1
    await worker.start()
    print(worker.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def elsewhere() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    yield process, (await process.stdout.readline()).decode().strip()
    process.kill()
    await process.wait()


async def test_silence_is_noticed(
    make: Callable[..., Cluster], elsewhere: tuple[asyncio.subprocess.Process, str]
) -> None:
    process, address = elsewhere
    cluster = make(max_attempts=1, control_timeout_s=600.0)
    cluster.fleet.add_worker(address, worker_id="c0")
    await cluster.until_state("c0", WorkerState.READY)
    deltas = cluster.generate(job())
    await anext(deltas)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):  # gRPC's own patience is a minute
            with pytest.raises(WorkerLost):
                await anext(deltas)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await cluster.until_state("c0", WorkerState.READY)
