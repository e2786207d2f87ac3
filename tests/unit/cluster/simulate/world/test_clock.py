"""The virtual loop: time jumps, ties are the seed's, and nothing outside can be reached."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest

from cluster.simulate.world.clock import Deadlock, OutsideWorld, VirtualLoop, run_virtually, running_loop

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result], seed: int = 0) -> Result:
    return run_virtually(main, loop=VirtualLoop(seed=seed))


def test_a_day_passes_at_once_and_to_the_second() -> None:
    async def a_day() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    assert run(a_day()) == 86_400


def order_of_ties(seed: int, *, num_first: int = 0) -> list[int]:
    async def ties() -> list[int]:
        order: list[int] = []
        for number in range(-num_first, 0):
            running_loop().call_first(1, partial(order.append, number))

        async def one(number: int) -> None:
            await asyncio.sleep(1)
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(20)))
        return order

    return run(ties(), seed)


def test_simultaneous_events_are_ordered_by_the_seed() -> None:
    assert order_of_ties(1) == order_of_ties(1)
    assert order_of_ties(1) != order_of_ties(2)
    assert sorted(order_of_ties(1)) == list(range(20))


def test_a_first_timer_keeps_the_order_of_the_rest() -> None:
    for seed in range(10):
        assert order_of_ties(seed, num_first=3) == [-3, -2, -1, *order_of_ties(seed)]


def test_callbacks_keep_the_order_asyncio_promises() -> None:
    async def soon() -> list[int]:
        order: list[int] = []
        for number in range(20):
            asyncio.get_running_loop().call_soon(order.append, number)
        await asyncio.sleep(0)
        return order

    assert run(soon()) == list(range(20))


def test_a_timeout_that_was_not_needed_leaves_nothing_behind() -> None:
    async def timeouts() -> float:
        for _ in range(1000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time()

    assert run(timeouts()) == pytest.approx(1.0)


def test_live_timers_are_not_swept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, num_sweeps = heapq.heapify, 0

    def counted(timers: list[Any]) -> None:
        nonlocal num_sweeps
        num_sweeps += 1
        sweep(timers)

    monkeypatch.setattr(heapq, "heapify", counted)

    async def sleeps() -> None:
        for _ in range(1000):
            await asyncio.sleep(0.001)

    run(sleeps())
    assert not num_sweeps

    async def timeouts() -> None:
        for _ in range(1000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0.001)

    run(timeouts())
    assert 0 < num_sweeps <= 1000 / 64, "every one of them had at least 64 to sweep out"


def test_waiting_for_nothing_is_a_deadlock_and_says_who_waits() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.create_task(forever(), name="the one who waits")

    with pytest.raises(Deadlock, match="the one who waits"):
        run(main())


def test_threads_and_sockets_are_out_of_reach() -> None:
    async def thread() -> None:
        await asyncio.to_thread(time.monotonic)

    async def connection() -> None:
        await asyncio.open_connection("localhost", 1)

    for outside in (thread, connection):
        with pytest.raises(OutsideWorld):
            run(outside())


def test_an_error_of_a_forgotten_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, [].pop)
        await asyncio.sleep(10)

    with pytest.raises(IndexError):
        run(main())
