"""How many lines of batches run at a time."""

from __future__ import annotations

import asyncio

from router.jobs import FleetView

LOOK_S = 0.5


class BatchRoom:
    """At most `max_running` lines in this process, and none while no request could be served."""

    def __init__(self, fleet: FleetView, max_running: int) -> None:
        self._fleet = fleet
        self._free = asyncio.Semaphore(max_running)

    async def enter(self) -> None:
        """Returns when another line may run. `leave` comes once after each."""
        await self._free.acquire()
        try:
            await self.served()
        except BaseException:
            self._free.release()
            raise

    def leave(self) -> None:
        self._free.release()

    async def served(self) -> None:
        while not self._fleet.ready():  # noqa: ASYNC110 - a fleet notifies the dispatcher alone
            await asyncio.sleep(LOOK_S)
