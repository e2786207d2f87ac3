"""A fleet that sleeps: its workers have ended, and the first request starts them again.

SleepWatch: the fleet is empty ─▶ the owner's report: asleep? ─▶ a job waits: WAKE ─▶ workers join: awake
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from protos.errors import BatonError
from protos.event_loop import loop_time
from router.fleet_owner import FleetOrder, FleetOwner, FleetReport, OrderKind
from router.jobs import FleetView

log = logging.getLogger("baton.router")

LOOK_S = 0.5


class FleetSleep:
    """A gateway's view of its fleet's sleep. `wanted` is set while a job waits for a worker."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self._is_asleep = False
        self._start_s = 0.0
        self._woken_s: float | None = None

    @property
    def may_serve(self) -> bool:
        return self._is_asleep or self._woken_s is not None

    def expected_s(self, now: float) -> float:
        """Seconds until a worker is expected to serve, by the starts that were measured; 0 if unknown."""
        return max(0.0, self._start_s - (now - self._woken_s if self._woken_s is not None else 0.0))

    def describe(self, now: float) -> str:
        if not self.may_serve:
            return ""
        due = f" in about {self.expected_s(now):.0f} s" if self._start_s else ""
        if self._woken_s is not None:
            return f"the fleet wakes up: a worker is expected{due or ' soon'}"
        return (
            f"the fleet is asleep: the first request starts its workers, and is served{due or ' once they are ready'}"
        )

    def learn(self, report: FleetReport, now: float) -> None:
        self._start_s = report.start_s
        if report.desired.is_asleep:
            self._is_asleep, self._woken_s = True, None
        elif self._is_asleep:  # woken by another gateway
            self.waking(now)

    def waking(self, now: float) -> None:
        self._is_asleep, self._woken_s = False, now

    def awake(self) -> None:
        self.wanted.clear()
        self._is_asleep, self._woken_s = False, None


class SleepWatch:
    """Wakes a sleeping fleet for waiting jobs. `run` lasts until it is cancelled."""

    def __init__(self, sleep: FleetSleep, fleet: FleetView, owner: FleetOwner) -> None:
        self._sleep = sleep
        self._fleet = fleet
        self._owner = owner
        self._failure = ""

    async def run(self) -> None:
        sleep = self._sleep
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await (sleep.wanted if not sleep.wanted.is_set() else asyncio.Event()).wait()
            if self._fleet.ready():
                sleep.awake()
            elif not self._fleet.status():
                await self._look(sleep)

    async def _look(self, sleep: FleetSleep) -> None:
        try:
            report = await self._owner.view()
            sleep.learn(report, loop_time())
            if report.desired.is_asleep and sleep.wanted.is_set():
                await self._wake(sleep)
        except BatonError as error:
            log.debug("whether the fleet is asleep is not known: %s", error.message)

    async def _wake(self, sleep: FleetSleep) -> None:
        """Wakes the fleet: repeats the order until it succeeds. Each new reason of a failure is logged once."""
        try:
            await self._owner.order(FleetOrder(kind=OrderKind.WAKE, who="a request", why="the fleet was asleep"))
        except BatonError as error:
            level = logging.DEBUG if error.message == self._failure else logging.WARNING
            log.log(level, "the fleet sleeps on, and is woken again in %.1f s: %s", LOOK_S, error.message)
            self._failure = error.message
            return
        self._failure = ""
        sleep.wanted.clear()
        sleep.waking(loop_time())
