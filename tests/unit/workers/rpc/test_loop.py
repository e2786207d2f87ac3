"""The engine's thread goes on while there is a step to launch or to fetch, and tells in order what came of each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protos.values import StepMessage
from tests.unit.workers.harness import ToyEngine, ask, by_hand
from workers.rpc import loop as loop_module
from workers.rpc.loop import ThreadedEngineLoop
from workers.scheduling.role import Role


class Expecting(Role):
    """A role with a ticket out, whose KV does not come yet."""

    def busy(self) -> bool:
        return True


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_it_never_dozes_with_a_step_in_flight(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_TICK_S", 3600.0)  # whoever waits for a tick, waits too long
    toy = ToyEngine(depth=depth)
    told: list[StepMessage] = []
    ended = asyncio.Event()

    def publish(message: StepMessage) -> None:
        told.append(message)
        if any(update.finish_reason for update in message.updates):
            ended.set()

    def fail(error: BaseException) -> None:
        raise error

    engine_loop = ThreadedEngineLoop(toy.engine, clock=asyncio.get_running_loop().time, publish=publish, on_fault=fail)
    engine_loop.start()
    await engine_loop.call(lambda: toy.submit(ask("r", range(10), 6)))
    await asyncio.wait_for(ended.wait(), 60)
    await engine_loop.stop()
    tokens: list[Any] = [token for message in told for update in message.updates for token in update.token_ids]
    assert tuple(tokens) == by_hand(range(10), 6)
    toy.engine.assert_idle()


async def test_a_worker_waiting_for_anothers_prompt_is_healthy() -> None:
    now = [0.0]
    toy = ToyEngine(role=Expecting())
    engine_loop = ThreadedEngineLoop(
        toy.engine, clock=lambda: now[0], publish=lambda message: None, on_fault=lambda error: None, stall_s=60.0
    )
    engine_loop.start()
    await engine_loop.call(lambda: None)
    now[0] = 1000.0
    async with asyncio.timeout(60):
        while not engine_loop.health(now[0]).healthy:  # once a turn has begun and ended since
            await engine_loop.call(lambda: None)
    await engine_loop.stop()
