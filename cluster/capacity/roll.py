"""Replaces the workers of a fleet by those of another revision while requests continue.

newer workers start, at most `surge` of each pool too many ─▶ they serve ─▶ older ones drain ─▶ newer ones start ..."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from protos.errors import InvalidRequest, Misconfigured, Unavailable
from protos.values import WorkerRole
from router.fleet_owner import Revision

log = logging.getLogger("baton.cluster")

RETRY_S = 1.0  # without a supervisor, or without Ray

Counts = dict[WorkerRole, int]


class FleetActuator(Protocol):
    """Brings a desired fleet about: the supervisor of real workers, or of simulated ones."""

    async def begin(
        self,
        counts: Mapping[WorkerRole, int],
        flips: Mapping[str, WorkerRole] | None = None,
        *,
        revision: Revision | None = None,
        kept: Mapping[WorkerRole, int] | None = None,
    ) -> Awaitable[None]:
        """Desires these numbers of workers of this `revision` (the last one, if none is given) and `kept` of others;
        workers in `flips` change roles. Raises Misconfigured if the machines cannot hold them, Unavailable if this is
        unknown. The result returns when the fleet is reached or replaced, and raises the BatonError of a worker that
        will never start."""
        ...

    def roles(self) -> Mapping[str, WorkerRole]:
        """Returns the desired workers' roles by id."""
        ...

    def serving(self) -> Mapping[str, WorkerRole]:
        """Returns the present roles of the workers that serve, by id."""
        ...

    def waiting_for(self) -> Sequence[str]:
        """Returns a phrase for each worker that keeps the desired fleet from being reached."""
        ...

    def start_s(self) -> float:
        """Returns the median seconds of the latest starts of workers; 0 before the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RollMix:
    """Workers of each role, with the fleet's next revision and with others."""

    newer: Counts
    older: Counts

    @property
    def is_over(self) -> bool:
        return not any(self.older.values())

    def reversed(self) -> RollMix:
        return RollMix(newer=self.older, older=self.newer)

    def all_older(self) -> RollMix:
        both = {role: self.newer[role] + self.older[role] for role in self.newer}
        return RollMix(newer=dict.fromkeys(both, 0), older=both)


def next_mix(mix: RollMix, counts: Mapping[WorkerRole, int], surge: int) -> RollMix | None:
    """Returns the next step to a fleet of `counts` workers; None if it is reached. Each pool keeps an older worker
    until the newer revision is complete; without a surge it ends with its last one."""
    growing = {role: count for role, count in counts.items() if mix.newer[role] < count}
    needed = {role: growing.get(role, 0) - mix.newer[role] for role in counts}
    if growing and surge:
        needed = {role: max(1, count) for role, count in needed.items()}
    older = {role: min(mix.older[role], max(0, needed[role])) for role in counts}
    if older != mix.older:
        return replace(mix, older=older)
    if not growing:
        return None
    if surge:
        return replace(mix, newer={role: min(count, mix.newer[role] + surge) for role, count in counts.items()})
    room = {role: count - mix.newer[role] - mix.older[role] for role, count in growing.items()}
    if any(room.values()):
        return replace(mix, newer={role: mix.newer[role] + room.get(role, 0) for role in counts})
    return replace(mix, older={role: max(0, mix.older[role] - (role in growing)) for role in counts})


class FleetRoll:
    """A roll of a fleet of `counts` workers. Call `start`, then `run`; after an error or a cancelled run `turn` and
    `resume`; after an error on the way back, or a `resize`, `resume` again."""

    def __init__(
        self,
        actuator: FleetActuator,
        counts: Mapping[WorkerRole, int],
        *,
        former: Revision,
        to: Revision,
        surge: int,
        mix: RollMix | None = None,
    ) -> None:
        """`mix`: the workers that are there, if not `counts` of the former revision."""
        self._actuator = actuator
        self._counts = dict(counts)
        self._surge = surge
        self.former = former
        self.to = to
        self.mix = mix or RollMix(newer=dict.fromkeys(counts, 0), older=dict(counts))
        self._reached: Awaitable[None] | None = None
        self._next: RollMix | None = None

    async def start(self) -> None:
        """Begins the first step. Raises InvalidRequest if the machines cannot hold it, and Unavailable."""
        answering = [role for role in self._counts if role is not WorkerRole.PREFILL]
        lone = [role for role in answering if self._counts[role] == 1]
        if not self._surge and lone:
            raise InvalidRequest(
                f"surge=0 ends workers before others start, and there is 1 {lone[0]} worker: give a surge of 1, or "
                f"`baton scale {lone[0]}=2` first",
                param="surge",
            )
        try:
            await self._begin(next_mix(self.mix, self._counts, self._surge) or self.mix)
        except Misconfigured as error:
            raise InvalidRequest(
                f"{error.message}. A roll starts {self._surge} of each pool before it ends others; `--surge 0` ends "
                "one first",
                param="surge",
            ) from error

    async def run(self) -> None:
        """Raises the BatonError of a worker that will never start."""
        while True:
            if self._reached is not None:
                await self._reached
                assert self._next is not None
                self.mix, self._reached = self._next, None
            mix = next_mix(self.mix, self._counts, self._surge)
            if mix is None:
                return
            await self._begin_in_time(mix)

    def turn(self) -> None:
        """Swaps the revisions: what was started is replaced."""
        self.former, self.to, self.mix = self.to, self.former, self.mix.reversed()

    def resize(self, counts: Mapping[WorkerRole, int]) -> None:
        newer = {role: min(self.mix.newer[role], count) for role, count in counts.items()}
        older = {role: min(self.mix.older[role], count - newer[role]) for role, count in counts.items()}
        self._counts, self.mix = dict(counts), RollMix(newer=newer, older=older)

    async def resume(self) -> None:
        """Runs on from the latest mix that was reached."""
        await self._begin_in_time(self.mix)
        await self.run()

    async def _begin_in_time(self, mix: RollMix) -> None:
        while True:
            try:
                return await self._begin(mix)
            except (Unavailable, Misconfigured) as error:
                log.warning("the roll waits: %s", error.message)
                await asyncio.sleep(RETRY_S)

    async def _begin(self, mix: RollMix) -> None:
        self._reached = await self._actuator.begin(mix.newer, revision=self.to, kept=mix.older)
        self._next = mix
