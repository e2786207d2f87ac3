"""A process notices that it stood still, and takes nothing else for that."""

from __future__ import annotations

import asyncio

from protos.event_loop import OwnPauses
from tests.unit.cluster.virtual_time import VirtualLoop, run_virtually


def test_only_a_loop_that_stood_still_has_paused() -> None:
    async def scenario() -> None:
        loop, pauses = asyncio.get_running_loop(), OwnPauses()
        assert isinstance(loop, VirtualLoop)
        assert not pauses.is_recent()
        await asyncio.sleep(20)
        assert not pauses.is_recent(), "nothing watched the loop"
        pauses.watch()
        await asyncio.sleep(20)
        assert not pauses.is_recent()
        loop._virtual.now += 20
        assert pauses.is_recent()
        await asyncio.sleep(pauses.RECENT_S)
        assert not pauses.is_recent()
        pauses.close()

    run_virtually(scenario())
