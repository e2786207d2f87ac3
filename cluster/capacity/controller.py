"""Owns the desired fleet of a cluster, which only `order` changes.

order ─▶ check ─▶ actuator.begin: do the machines hold it? ─▶ record the change ─▶ reached, failed or replaced
                        └── no: the error, and nothing has changed"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.capacity.roll import FleetActuator, FleetRoll, RollMix
from protos.errors import BatonError, InvalidRequest, Misconfigured
from protos.event_loop import Changed
from protos.values import WorkerRole
from router.fleet_owner import (
    RING_SIZE,
    ChangeState,
    DesiredFleet,
    FleetChange,
    FleetOrder,
    FleetReport,
    OrderKind,
    Revision,
    RollProgress,
    flipped,
    scaled,
)

log = logging.getLogger("baton.cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """`configured`: the fleet of the settings with which the owner began; `origin`: the digest of their worker
    settings. Other settings take precedence over the record."""

    configured: DesiredFleet
    desired: DesiredFleet
    changes: tuple[FleetChange, ...] = ()
    origin: str = ""


class FleetStore(Protocol):
    """Keeps the owner's record over its lives. Never fails: a record is written later if it cannot be now."""

    def save(self, record: FleetRecord) -> None: ...


Revise = Callable[[Revision, FleetOrder], Revision]
"""The revision after a roll. Raises Misconfigured for settings that workers cannot have."""


@dataclass(slots=True)
class UnderWay:
    """The roll of a change. Without a task the way back has failed, and workers of two revisions are there."""

    roll: FleetRoll
    number: int
    is_back: bool = False
    task: asyncio.Task[None] | None = None

    def mix_for(self, to: Revision) -> RollMix:
        return self.roll.mix.reversed() if to == self.roll.former else self.roll.mix.all_older()

    def refusal(self) -> InvalidRequest:
        if not self.is_back:
            problem = f"change {self.number} rolls the fleet: wait for its end, or `baton roll --abort`"
        elif self.task is not None:
            problem = (
                f"change {self.number} takes the fleet back to its former revision: wait for its end; where there is "
                "no room, `baton scale` to fewer workers lets it end"
            )
        else:
            problem = (
                f"change {self.number} did not get back to the former revision, and workers of two are there: "
                "`baton roll --abort` or `baton scale` tries again, `baton roll` replaces them all"
            )
        return InvalidRequest(problem, param="kind")

    def progress(self) -> RollProgress:
        mix = self.roll.mix
        return RollProgress(number=self.number, to=self.roll.to, newer=mix.newer, older=mix.older)


class FleetController:
    """The `FleetOwner` where the desired fleet lives. `record`: of an earlier owner with the same `configured` fleet.
    `store`: None if the workers end with the owner. `revise`: None if the fleet cannot be rolled. `cut_off`: the roll
    of an earlier owner."""

    def __init__(
        self,
        actuator: FleetActuator,
        configured: DesiredFleet,
        *,
        record: FleetRecord | None = None,
        store: FleetStore | None = None,
        revise: Revise | None = None,
        origin: str = "",
        cut_off: FleetRoll | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._actuator = actuator
        self._revise, self._origin = revise, origin
        self._rolling = UnderWay(cut_off, 0, is_back=True) if cut_off is not None else None
        self._record = record or FleetRecord(configured=configured, desired=configured, origin=origin)
        assert self._record.configured == configured, "a record of other settings is not continued"
        self._store = store
        self._wall_clock = wall_clock
        self._line = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = Changed()
        self._save(self._record)

    @property
    def desired(self) -> DesiredFleet:
        return self._record.desired

    @property
    def changes(self) -> Sequence[FleetChange]:
        """Oldest first."""
        return self._record.changes

    async def view(self) -> FleetReport:
        serving = list(self._actuator.serving().values())
        return FleetReport(
            desired=self.desired,
            serving={role: serving.count(role) for role in self.desired.counts},
            waiting_for=tuple(self._actuator.waiting_for()),
            start_s=self._actuator.start_s(),
            changes=self._record.changes,
            rolling=self._rolling.progress() if self._rolling is not None else None,
        )

    async def order(self, order: FleetOrder) -> FleetChange:
        async with self._line:
            if order.kind is OrderKind.ROLL:
                return await self._roll(order)
            if order.kind is OrderKind.ABORT:
                return await self._abort(order)
            if self._rolling is not None and self._rolling.is_back and order.kind is OrderKind.SCALE:
                return await self._go_back(self._rolling, order, scaled(self.desired, order.counts))
            if self._rolling is not None:
                raise self._rolling.refusal()
            after, flips = self._target(order)
            if after == self.desired and not flips:
                return self._new_change(order, after, number=0, state=ChangeState.REACHED)
            try:
                reached = await self._actuator.begin(after.counts, flips)
            except Misconfigured as error:  # a mistake of the order, not of the settings that serve
                raise InvalidRequest(error.message, param=error.param) from error
            change = self._add(order, after)
        self._begin_task(self._follow(change, reached), change)
        return change

    def _add(self, order: FleetOrder, after: DesiredFleet) -> FleetChange:
        number = self._record.changes[-1].number + 1 if self._record.changes else 1
        self._end_replaced(number, order)
        change = self._new_change(order, after, number=number)
        changes = (*self._record.changes, change)[-RING_SIZE:]
        self._save(replace(self._record, desired=after, changes=changes))
        log.info("change %d, a %s by %s: the fleet is to be %s%s", number, order.kind, order.who or "an operator",
                 after, f": {order.why}" if order.why else "")  # fmt: skip
        return change

    def _begin_task(self, work: Coroutine[Any, Any, None], change: FleetChange) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"change {change.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ended(self, number: int) -> FleetChange:
        """Returns the change once it has ended. Raises InvalidRequest for an unknown one."""
        while True:
            change = next((latest for latest in self._record.changes if latest.number == number), None)
            if change is None:
                raise InvalidRequest(f"there is no change {number} among the latest {RING_SIZE}", param="number")
            if change.state is not ChangeState.UNDER_WAY:
                return change
            await self._changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------------------

    def _target(self, order: FleetOrder) -> tuple[DesiredFleet, dict[str, WorkerRole]]:
        """Raises InvalidRequest."""
        match order:
            case FleetOrder(kind=OrderKind.SCALE):
                return scaled(self.desired, order.counts), {}
            case FleetOrder(kind=OrderKind.FLIP, role=WorkerRole() as role):
                after = flipped(self.desired, order.worker_id, self._actuator.roles(), role)
                return after, {order.worker_id: role}
            case FleetOrder(kind=OrderKind.WAKE):
                return self._awake(), {}
        raise InvalidRequest(f"an order of the kind {order.kind} needs a worker and a role", param="role")

    def _awake(self) -> DesiredFleet:
        fleets = (self.desired, *(change.before for change in reversed(self._record.changes)), self._record.configured)
        awake = next(fleet for fleet in fleets if not fleet.is_asleep)
        return replace(awake, revision=self.desired.revision)

    def _new_change(
        self, order: FleetOrder, after: DesiredFleet, *, number: int, state: ChangeState = ChangeState.UNDER_WAY
    ) -> FleetChange:
        now = self._wall_clock()
        return FleetChange(
            number=number, kind=order.kind, who=order.who, why=order.why, before=self.desired, after=after, at_s=now,
            worker_id=order.worker_id, state=state, ended_s=0.0 if state is ChangeState.UNDER_WAY else now,
        )  # fmt: skip

    # -- rolls ---------------------------------------------------------------------------------------------------------

    async def _roll(self, order: FleetOrder) -> FleetChange:
        if self._revise is None:
            raise InvalidRequest("the workers of this cluster were started by others, who can also replace them")
        stuck = self._rolling
        if stuck is not None and stuck.task is not None:
            raise stuck.refusal()
        before = self.desired
        try:
            to = self._revise(before.revision, order)
        except Misconfigured as error:
            raise InvalidRequest(error.message, param=error.param) from error
        if to == before.revision and stuck is None:
            return self._new_change(order, before, number=0, state=ChangeState.REACHED)
        if stuck is not None and to == before.revision:
            return await self._go_back(stuck, order, before)
        roll = FleetRoll(
            self._actuator, before.counts, former=before.revision, to=to, surge=order.surge,
            mix=None if stuck is None else stuck.mix_for(to),
        )  # fmt: skip
        await roll.start()
        self._record = replace(self._record, origin=self._origin)
        change = self._add(order, replace(before, revision=to))
        self._rolling = UnderWay(roll, change.number)
        self._rolling.task = self._begin_task(self._follow_roll(self._rolling, before), change)
        return change

    async def _abort(self, order: FleetOrder) -> FleetChange:
        rolling = self._rolling
        if rolling is None:
            raise InvalidRequest("no roll is under way that could be aborted", param="kind")
        if rolling.is_back and rolling.task is not None:
            raise rolling.refusal()
        former = rolling.roll.to if rolling.is_back else rolling.roll.former
        return await self._go_back(rolling, order, replace(self.desired, revision=former))

    async def _go_back(self, rolling: UnderWay, order: FleetOrder, after: DesiredFleet) -> FleetChange:
        if rolling.task is not None:
            rolling.task.cancel()
            await asyncio.gather(rolling.task, return_exceptions=True)
        if not rolling.is_back:
            rolling.roll.turn()
        if after.counts != self.desired.counts:
            rolling.roll.resize(after.counts)
        change = self._add(order, after)
        self._rolling = UnderWay(rolling.roll, change.number, is_back=True)
        self._rolling.task = self._begin_task(self._follow_roll(self._rolling, after), change)
        return change

    async def _follow_roll(self, rolling: UnderWay, before: DesiredFleet) -> None:
        """Watches a roll. A failed roll is rolled back once; if that fails too, workers of both revisions stay until
        the next order."""
        failure, reason = "", ""
        if not rolling.is_back and (failure := await self._failure_of(rolling.roll.run(), "the roll")):
            rolling.is_back = True
            rolling.roll.turn()
            self._save(replace(self._record, desired=before))
        if rolling.is_back and (reason := await self._failure_of(rolling.roll.resume(), "the way back of the roll")):
            failure = f"{failure}{'; ' * bool(failure)}the way back fails: {reason}"
        rolling.task = None
        self._rolling = rolling if reason and not rolling.roll.mix.is_over else None
        self._end(rolling.number, ChangeState.FAILED if failure else ChangeState.REACHED, failure)

    @staticmethod
    async def _failure_of(work: Awaitable[None], what: str) -> str:
        """Returns why the work failed, or "". A change must not stay under way forever, whatever is raised."""
        try:
            await work
        except BatonError as error:
            log.error("%s fails: %s", what, error.message)
            return error.message
        except Exception as error:
            log.exception("%s fails: internal error", what)
            return f"{type(error).__name__}: {error}"
        return ""

    async def _follow(self, change: FleetChange, reached: Awaitable[None]) -> None:
        if failure := await self._failure_of(reached, f"change {change.number} to {change.after}"):
            self._end(change.number, ChangeState.FAILED, failure)
        else:
            is_there = not self._actuator.waiting_for()
            self._end(change.number, ChangeState.REACHED if is_there else ChangeState.REPLACED)

    def _end(self, number: int, state: ChangeState, reason: str = "") -> None:
        """Records the outcome of a change unless another one has replaced it. After a failure the fleet is that of the
        actuator."""
        latest = self._record.changes[-1]
        if latest.number != number or latest.state is not ChangeState.UNDER_WAY:
            return
        ended = replace(latest, state=state, reason=reason, ended_s=self._wall_clock())
        record = replace(self._record, changes=(*self._record.changes[:-1], ended))
        if state is ChangeState.FAILED and ended.kind is not OrderKind.ROLL and self._rolling is None:
            wanted = list(self._actuator.roles().values())
            counts = {role: wanted.count(role) for role in self.desired.counts}
            record = replace(record, desired=replace(self.desired, counts=counts))
        self._save(record)

    def _end_replaced(self, number: int, order: FleetOrder) -> None:
        if self._record.changes and self._record.changes[-1].state is ChangeState.UNDER_WAY:
            who = order.who or "an operator"
            is_abort = order.kind is OrderKind.ABORT
            reason = f"{who} aborts it with change {number}" if is_abort else f"change {number} by {who} replaces it"
            self._end(self._record.changes[-1].number, ChangeState.REPLACED, reason)

    def _save(self, record: FleetRecord) -> None:
        self._record = record
        if self._store is not None:
            self._store.save(record)
        self._changed.notify()


def continued(record: FleetRecord | None, configured: DesiredFleet, origin: str = "") -> FleetRecord | None:
    """Returns the record of an earlier owner that began with the same settings. Its changes have ended: its workers
    start anew, those of a roll with the former revision."""
    if record is None or record.configured != configured:
        return None
    latest = record.changes[-1] if record.changes else None
    if latest is not None and latest.kind is OrderKind.ROLL and latest.state is ChangeState.UNDER_WAY:
        record = replace(record, desired=latest.before)
    if record.origin != origin:
        record = replace(record, desired=replace(record.desired, revision=Revision()), origin=origin)
    return replace(record, changes=as_cut_off(record.changes))


def as_cut_off(changes: Sequence[FleetChange]) -> tuple[FleetChange, ...]:
    return tuple(map(_cut_off, changes))


def _cut_off(change: FleetChange) -> FleetChange:
    if change.state is not ChangeState.UNDER_WAY:
        return change
    if change.kind is OrderKind.ROLL:
        undone = "its owner has ended before it had; the next one began with the former revision"
        return replace(change, state=ChangeState.FAILED, reason=undone)
    return replace(change, state=ChangeState.REACHED, reason="its owner has ended; the next one began with this fleet")
