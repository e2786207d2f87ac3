"""What a worker's ranks tell, made one: who is listened to, and which of several reasons is given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayError

from cluster import launcher
from cluster.launcher import RayLauncher, merged
from cluster.rank import Ended, Event, Loading, Logged
from protos.errors import BadCheckpoint, BatonError, WorkerLost
from protos.wire import error_info
from workers.config import WorkerConfig

ENDED = Ended()


class Rank:
    """A Ray actor's handle, as far as it matters: `rank.news.remote()` is awaited."""

    def __init__(self, *told: Sequence[Event] | Exception) -> None:
        self._told = list(told)
        self.news = self

    def remote(self) -> Any:
        return self._next()

    async def _next(self) -> Sequence[Event]:
        if not self._told:
            await asyncio.Event().wait()
        told = self._told.pop(0)
        if isinstance(told, Exception):
            raise told
        return told


def broke(error: BatonError) -> Ended:
    return Ended(error=error_info(error))


async def heard(*ranks: Rank) -> list[Event]:
    async with aclosing(merged("decode-0", ranks)) as events:
        return [event async for event in events]


async def test_rank_0_speaks_for_the_worker_and_all_may_log() -> None:
    first = Rank([Loading(share=0.5)], [Loading(share=1.0)], [ENDED])
    second = Rank([Loading(share=0.1), Logged(level=logging.WARNING, message="low memory")], [ENDED])
    assert set(await heard(first, second)) == {
        Loading(share=0.5), Loading(share=1.0), Logged(level=logging.WARNING, message="low memory"),
    }  # fmt: skip


async def test_a_follower_that_ends_in_order_does_not_end_the_worker() -> None:
    async with aclosing(merged("decode-0", [Rank([Loading(share=0.5)]), Rank([ENDED])])) as events:
        assert await anext(events) == Loading(share=0.5)
        more = asyncio.ensure_future(anext(events))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not more.done()
        more.cancel()
        await asyncio.wait([more])


async def test_a_dead_process_is_named_in_one_line() -> None:
    with pytest.raises(WorkerLost) as lost:
        await heard(Rank(), Rank(RayError("a page\nof Ray's thoughts")))
    assert lost.value.message.startswith("the process of rank 1 of decode-0 is gone: ")
    assert "\n" not in lost.value.message


async def test_a_process_that_was_killed_is_told_so_in_plain_words() -> None:
    """Ray's own, of a worker that was killed with -9."""
    rays = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\nThe actor is dead because "
        "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
        "with a connection error code 2. End of file. Some common causes include: (1) it was killed by SIGKILL"
    )
    with pytest.raises(WorkerLost) as lost:
        await heard(Rank(RayError(rays)))
    assert lost.value.message == "its process is gone: it was killed, or crashed (dmesg tells whether memory ran out)"


async def test_wrong_settings_are_told_rather_than_that_the_others_left() -> None:
    left = WorkerLost("rank 0 of 2 lost its tensor-parallel group")
    reason = BadCheckpoint("rank 1 cannot read the weights")
    with pytest.raises(BadCheckpoint, match="cannot read the weights"):
        await heard(Rank([broke(left)]), Rank([broke(reason)]))


async def test_a_worker_is_killed_also_by_whom_its_polite_stop_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray kept the CPU of one that was stopped by a signal: nothing ever took its place. On Python 3.11.2 the polite
    stop's own timeout cut it off."""
    killed, stopping, following = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stuck(Rank):
        @property
        def stop(self) -> Any:
            return SimpleNamespace(remote=self._stay)

        async def _stay(self) -> None:
            stopping.set()
            await asyncio.Event().wait()

    async def call(make: Any) -> Any:
        return make()

    async def ready() -> None:
        pass

    async def started(*_: object) -> list[int]:
        return [1]

    monkeypatch.setattr(launcher, "placement_group", lambda *_, **__: SimpleNamespace(ready=ready))
    monkeypatch.setattr(launcher, "_kill", lambda *_: loop.call_soon_threadsafe(killed.set))
    monkeypatch.setattr(RayLauncher, "_rank", lambda *_: Stuck())
    monkeypatch.setattr(RayLauncher, "_start_in_time", started)
    config = SimpleNamespace(worker=WorkerConfig(model="none"))
    plan = cast(Any, SimpleNamespace(worker_id="decode-0", num_ranks=1, bundles=list))
    ranks = RayLauncher(cast(Any, config), cast(Any, SimpleNamespace(call=call, host="here")))

    async def follow() -> None:
        async with aclosing(ranks.launch(plan, 1)) as events:
            async for _ in events:
                following.set()

    task = asyncio.create_task(follow())
    await following.wait()
    task.cancel()
    await stopping.wait()
    task.cancel()
    await asyncio.wait([task])
    assert killed.is_set()
