"""When a request comes again that was let through and found no room in the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from protos.errors import Overloaded
from router.jobs import Job, TokenDelta
from tests.unit.cluster.virtual_time import run_virtually
from tests.unit.router.admission.test_admission import Pool, admission, job, run, settle


def test_an_admitted_job_without_room_waits_as_long_as_the_queue() -> None:
    class Full(Pool):
        async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
            await asyncio.sleep(5.0)
            raise Overloaded("no free blocks", retry_after_s=1.0)
            yield

    async def scenario() -> None:
        pool = Full()
        gate = admission(pool)
        tried = asyncio.create_task(run(gate, job("tried")))
        await settle()
        pool.show(num_waiting=64, num_requests=128)
        waiting = asyncio.create_task(run(gate, job("waiting")))
        with pytest.raises(Overloaded, match="no free blocks") as refused:
            await tried
        assert refused.value.retry_after_s == 30.0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run_virtually(scenario())


def test_an_admitted_job_without_room_returns_after_the_queue() -> None:
    class Full(Pool):
        async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
            async with aclosing(super().__call__(job)) as deltas:
                async for delta in deltas:
                    if job.request_id == "tried":
                        raise Overloaded("no free blocks", retry_after_s=1.0)
                    yield delta

    async def scenario() -> None:
        pool = Full()
        gate = admission(pool)
        tried = asyncio.create_task(run(gate, job("tried")))
        await settle()
        pool.show(num_waiting=64, num_requests=128)
        waiting = [asyncio.create_task(run(gate, job(f"r{n}"))) for n in range(12)]
        for _ in range(4):  # 500 tokens every 2 s
            await asyncio.sleep(2.0)
            pool.show(num_waiting=63, queued_prefill_tokens=0)
            await settle()
            pool.finish(pool.given[-1])
            await settle()
        assert gate.num_waiting == 8
        pool.finish("tried")
        with pytest.raises(Overloaded, match="no free blocks") as refused:
            await tried
        assert refused.value.retry_after_s is not None
        assert 12.0 < refused.value.retry_after_s < 30.0, "nine prompts at 250 tokens a second"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run_virtually(scenario())
