"""The owner of the fleet with the gateways' reports, and the planner that follows them.

gateways ─ report ─▶ PlannedFleet ─ sights ─▶ Planner.decide ─ FleetOrder ─▶ the owner
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.planner.planner import KeptLoad, Planner, PlannerSettings, SightsNow
from router.fleet_owner import CapacityNews, FleetChange, FleetOrder, FleetOwner, FleetReport, GatewaySight, SeenSight

ADVICE_WINDOW_S = 60.0
"""Seconds of requests that gateways report while `baton plan` looks at them without a planner."""
_ADVISED_S = 300.0  # after the latest look
_IDLE_S = 10.0  # between two calls of a gateway that has nothing to report
_REPORTS = 3  # of a gateway between two decisions
_ADVICE_PERIOD_S = 5.0
_LATE_REPORTS = 6.0
_FORGET_WINDOWS = 2.0  # a gateway that has been silent for so many windows has ended


@dataclass(frozen=True, slots=True)
class _Received:
    sight: GatewaySight
    at_s: float  # by the clock of the owner


class PlannedFleet:
    """A `CapacityOwner`. Without `settings` nothing is planned. `wall_clock`: seconds since 1970."""

    def __init__(
        self,
        owner: FleetOwner,
        settings: PlannerSettings | None,
        *,
        kept: KeptLoad | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._received: dict[str, _Received] = {}
        self._advised_s = -_ADVISED_S
        self._planner = (
            None if settings is None else Planner(settings, owner, self._sights, wall_clock=wall_clock, kept=kept)
        )
        self._planning: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._planner is not None:
            self._planning = asyncio.create_task(self._planner.run(), name="planner")

    async def close(self) -> None:
        if self._planning is not None:
            self._planning.cancel()
            await asyncio.gather(self._planning, return_exceptions=True)
        await self._owner.close()

    async def view(self) -> FleetReport:
        report = await self._owner.view()
        return report if self._planner is None else replace(report, planner=self._planner.report(report))

    async def order(self, order: FleetOrder) -> FleetChange:
        return await self._owner.order(order)

    async def report(self, sight: GatewaySight | None) -> CapacityNews:
        if sight is not None:
            self._received.pop(sight.gateway_id, None)  # the latest comes last
            self._received[sight.gateway_id] = _Received(sight, self._clock())
        desired = (await self._owner.view()).desired.counts
        window_s = self._window_s()
        period_s = self._period_s() if window_s else _IDLE_S
        return CapacityNews(period_s=period_s, window_s=window_s, desired=desired)

    async def sights(self) -> tuple[SeenSight, ...]:
        self._advised_s = now = self._clock()
        self._forget(now)
        return tuple(SeenSight(sight=received.sight, age_s=now - received.at_s) for received in self._received.values())

    # ------------------------------------------------------------------------------------------------------------------

    def _window_s(self) -> float:
        if self._settings is not None:
            return self._settings.window_s
        return ADVICE_WINDOW_S if self._clock() - self._advised_s < _ADVISED_S else 0.0

    def _period_s(self) -> float:
        return _ADVICE_PERIOD_S if self._settings is None else self._settings.period_s / _REPORTS

    def _sights(self) -> SightsNow:
        """Returns the reports that are not late, and the names of the other gateways."""
        now = self._clock()
        self._forget(now)
        oldest_s = now - _LATE_REPORTS * self._period_s()
        current = {name: received for name, received in self._received.items() if received.at_s >= oldest_s}
        age_s = min((now - received.at_s for received in current.values()), default=0.0)
        silent = tuple(name for name in self._received if name not in current)
        return SightsNow(sights=tuple(received.sight for received in current.values()), age_s=age_s, silent=silent)

    def _forget(self, now: float) -> None:
        oldest_s = now - _FORGET_WINDOWS * (self._window_s() or ADVICE_WINDOW_S)
        self._received = {name: received for name, received in self._received.items() if received.at_s >= oldest_s}
