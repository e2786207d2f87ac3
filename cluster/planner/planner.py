"""The planner's loop: observe, decide, order. The fleet's owner stays when it ends."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.planner.decide import decide
from cluster.planner.observer import Observer
from cluster.planner.planner_values import (
    ActionTimes,
    FleetDecision,
    FleetLimits,
    FleetObjective,
    LearnedLoad,
    Observation,
    PlannerMemory,
    PlannerPace,
)
from protos.errors import BatonError, InvalidRequest
from protos.values import WorkerRole
from router.fleet_owner import (
    CapacityDecision,
    ChangeState,
    FleetChange,
    FleetOrder,
    FleetOwner,
    FleetReport,
    GatewaySight,
    OrderKind,
    PlannerReport,
)

log = logging.getLogger("baton.cluster")

NAME = "planner"
"""`who` of its changes."""
NUM_DECISIONS = 256
NUM_REPORTED = 32
_NUM_WEIGHED = 5
_NUM_TIMES = 8  # latest changes of a kind; their median is the expected duration


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """`manual_s`: an operator's change is left alone for this long. `times` hold until some were measured."""

    objective: FleetObjective
    limits: FleetLimits
    pace: PlannerPace = field(default_factory=PlannerPace)
    times: ActionTimes = field(default_factory=ActionTimes)
    period_s: float = 15.0
    window_s: float = 60.0
    manual_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SightsNow:
    """The gateways' reports, the latest last and `age_s` seconds old."""

    sights: Sequence[GatewaySight]
    age_s: float = 0.0
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLoad:
    """`earlier`: learned by an earlier planner. `save` never fails."""

    earlier: LearnedLoad | None
    save: Callable[[LearnedLoad], None]


class Planner:
    """`decisions`: oldest first. `wall_clock`: seconds since 1970."""

    def __init__(
        self,
        settings: PlannerSettings,
        owner: FleetOwner,
        sights: Callable[[], SightsNow],
        *,
        wall_clock: Callable[[], float],
        kept: KeptLoad | None = None,
    ) -> None:
        self._settings = settings
        self._kept = kept
        self._owner = owner
        self._sights = sights
        self._wall_clock = wall_clock
        self._observer = Observer(settings.objective, window_s=settings.window_s)
        self._memory = PlannerMemory(learned=kept.earlier if kept is not None and kept.earlier else LearnedLoad())
        self._pending_since_s: dict[WorkerRole, list[float]] = {}
        self._reported: deque[CapacityDecision] = deque(maxlen=NUM_REPORTED)
        self.decisions: deque[FleetDecision] = deque(maxlen=NUM_DECISIONS)

    async def run(self) -> None:
        """A decision that fails changes nothing, and the next one follows."""
        while True:
            await asyncio.sleep(self._settings.period_s)
            try:
                await self.plan()
            except BatonError as error:
                log.warning("the planner changes nothing: %s", error.message)
            except Exception:  # a bug in one decision: the fleet stays, and the next decision follows
                log.exception("the planner changes nothing: internal error")

    async def plan(self) -> FleetDecision:
        """Decides and orders. Raises BatonError if the owner does not answer."""
        report = await self._owner.view()
        decision, seen = self.advise(report)
        desired = report.desired.counts
        change, refused = 0, ""
        if decision.counts != desired and report.rolling is not None:
            refused = f"change {report.rolling.number} rolls the fleet: this waits for its end"
        elif decision.counts != desired:
            try:
                change = (await self._order(decision, desired)).number
            except InvalidRequest as error:
                refused = error.message
                self._give_up(_grown(desired, decision.counts), decision.at_s)
        self._reported.append(reported(decision, seen, desired, change=change, refused=refused))
        if refused:
            log.warning("the planner's order is refused: %s", refused)
        return decision

    def advise(self, report: FleetReport) -> tuple[FleetDecision, Observation | None]:
        """Returns the next decision, without its orders, and what it was made from."""
        settings, now = self._settings, self._wall_clock()
        desired = dict(report.desired.counts)
        self._note_pending(report, now)
        self._note_failed(report, now)
        looked = self._sights()
        seen = self._observer.look(
            looked.sights, at_s=now - looked.age_s, roles=desired, pending_since_s=self._pending_since_s,
            num_silent=len(looked.silent),
        )  # fmt: skip
        memory = replace(self._memory, manual_until_s=self.manual_until_s(report))
        decision = decide(
            seen, settings.objective, settings.limits, memory, now=now, desired=desired,
            times=measured_times(report, settings.times), pace=settings.pace,
        )  # fmt: skip
        self._memory = decision.memory
        if self._kept is not None:
            self._kept.save(decision.memory.learned)
        self.decisions.append(decision)
        return decision, seen

    def report(self, report: FleetReport) -> PlannerReport:
        objective, limits = self._settings.objective, self._settings.limits
        until_s = self.manual_until_s(report)
        return PlannerReport(
            ttft_s=objective.ttft_s, tpot_s=objective.tpot_s, attainment=objective.attainment,
            least=dict(limits.least), most=dict(limits.most),
            manual_until_s=until_s if until_s > self._wall_clock() else 0.0,
            silent=self._sights().silent, decisions=tuple(self._reported),
        )  # fmt: skip

    async def _order(self, decision: FleetDecision, desired: Mapping[WorkerRole, int]) -> FleetChange:
        """The order for a decision. A change of role comes first: as two numbers it would end one worker and start
        another. Raises InvalidRequest."""
        for source, target in decision.flips:
            worker_id = self._idlest(source)
            if worker_id:
                flip = FleetOrder(kind=OrderKind.FLIP, worker_id=worker_id, role=target, who=NAME, why=decision.reason)
                return await self._owner.order(flip)
        counts = {role: count for role, count in decision.counts.items() if count != desired[role]}
        return await self._owner.order(FleetOrder(kind=OrderKind.SCALE, counts=counts, who=NAME, why=decision.reason))

    def _idlest(self, role: WorkerRole) -> str:
        workers = self._sights().sights[-1].workers
        mine = [worker for worker in workers if worker.role is role and worker.state == "ready"]
        return (
            min(mine, key=lambda worker: (worker.num_running, worker.queued_prefill_tokens)).worker_id if mine else ""
        )

    def manual_until_s(self, report: FleetReport) -> float:
        """A wake and a roll change no number."""
        kinds = (OrderKind.SCALE, OrderKind.FLIP)
        by_hand = [change.at_s for change in report.changes if change.who != NAME and change.kind in kinds]
        return max(by_hand) + self._settings.manual_s if by_hand else 0.0

    def _give_up(self, roles: Sequence[WorkerRole], at_s: float) -> None:
        """Orders no more workers of these roles for a while."""
        until_s = dict.fromkeys(roles, at_s + self._settings.pace.rest_s)
        self._memory = replace(self._memory, gave_up_until_s=dict(self._memory.gave_up_until_s) | until_s)

    def _note_failed(self, report: FleetReport, now: float) -> None:
        since_s = now - self._settings.pace.rest_s
        for change in report.changes:
            if change.who == NAME and change.state is ChangeState.FAILED and change.ended_s > since_s:
                self._give_up(_grown(change.before.counts, change.after.counts), change.ended_s)

    def _note_pending(self, report: FleetReport, now: float) -> None:
        for role, count in report.desired.counts.items():
            since_s = self._pending_since_s.setdefault(role, [])
            missing = max(0, count - report.serving.get(role, 0))
            added = missing - len(since_s)
            since_s[:] = [*since_s, *[now] * added] if added > 0 else since_s[-added:]


def measured_times(report: FleetReport, otherwise: ActionTimes) -> ActionTimes:
    took: dict[str, list[float]] = {"flip_s": [], "drain_s": []}
    for change in report.changes:
        if change.state is ChangeState.REACHED and change.ended_s > change.at_s and not change.reason:
            if change.kind is OrderKind.FLIP:
                took["flip_s"].append(change.ended_s - change.at_s)
            elif change.kind is OrderKind.SCALE and not _grown(change.before.counts, change.after.counts):
                took["drain_s"].append(change.ended_s - change.at_s)
    measured = {name: statistics.median(times[-_NUM_TIMES:]) for name, times in took.items() if times}
    return replace(otherwise, **measured, start_s=report.start_s or otherwise.start_s)


def reported(
    decision: FleetDecision,
    seen: Observation | None,
    desired: Mapping[WorkerRole, int],
    *,
    change: int = 0,
    refused: str = "",
) -> CapacityDecision:
    return CapacityDecision(
        at_s=decision.at_s,
        desired=dict(desired),
        counts=dict(decision.counts),
        reason=decision.reason,
        attainment=seen.attainment if seen is not None else 0.0,
        arrival_rate=seen.arrival_rate if seen is not None else 0.0,
        num_waiting=seen.num_waiting if seen is not None else 0,
        weighed=decision.weighed[:_NUM_WEIGHED],
        change=change,
        refused=refused,
    )


def _grown(before: Mapping[WorkerRole, int], after: Mapping[WorkerRole, int]) -> Sequence[WorkerRole]:
    return [role for role in after if after[role] > before.get(role, 0)]
