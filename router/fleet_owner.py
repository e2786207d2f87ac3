"""The desired fleet as values, and the interface of its one owner, which lives with the supervisor.

operator, planner ─ FleetOrder ─▶ any gateway ─▶ FleetOwner: check, record a FleetChange, act ─▶ FleetReport

gateway ─ GatewaySight ─▶ CapacityOwner ─▶ planner ─ FleetOrder ─▶ FleetOwner
   ▲                          │
   └────── CapacityNews ──────┘        PlannerReport ─▶ /admin/capacity, `baton why --capacity`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from protos.errors import InvalidRequest
from protos.values import WorkerRole


class RequestSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Times are by the gateway's event loop, None for no event yet. `failed`: it ended without an answer although its
    client stayed."""

    received_s: float
    first_s: float | None
    last_s: float | None
    ended_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    failed: bool


class WorkerSight(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's latest load. `num_kv_tokens` fit into its KV memory; speeds are 0 while unknown."""

    worker_id: str
    role: WorkerRole
    state: str
    num_running: int
    queued_prefill_tokens: int
    decode_step_s: float
    prefill_tokens_per_s: float
    num_kv_tokens: int


class GatewaySight(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process's report of the `covered_s` seconds before `now_s`, by its event loop's clock. `num_arrived`
    includes refused requests; `samples` are evenly chosen if there are many."""

    gateway_id: str
    now_s: float
    covered_s: float
    num_arrived: int
    num_waiting: int
    samples: tuple[RequestSample, ...]
    workers: tuple[WorkerSight, ...]


class CapacityNews(msgspec.Struct, frozen=True, kw_only=True):
    """`period_s`: seconds until the next report is due. `window_s`: seconds that it covers, 0 if it is not
    needed."""

    period_s: float
    window_s: float
    desired: dict[WorkerRole, int]


class SeenSight(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's latest report, `age_s` seconds old."""

    sight: GatewaySight
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCounts:
    """A fleet that the planner weighed. `attainment`: the share of requests served in time. `cost`: device seconds
    over the horizon, changes included."""

    counts: dict[WorkerRole, int]
    attainment: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityDecision:
    """`counts`: the planned fleet; `desired`: the present one. `change`: the number of the ordered change, 0 for none.
    `at_s`: seconds since 1970. `attainment`, `arrival_rate` (requests a second) and `num_waiting` are what clients
    saw."""

    at_s: float
    desired: dict[WorkerRole, int]
    counts: dict[WorkerRole, int]
    reason: str
    attainment: float
    arrival_rate: float
    num_waiting: int
    weighed: tuple[WeighedCounts, ...] = ()
    change: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerReport:
    """Objectives are seconds, `least` and `most` workers by role. The planner leaves an operator's change alone
    until `manual_until_s` (seconds since 1970, 0 for none), and removes no worker while gateways are `silent`."""

    ttft_s: float
    tpot_s: float
    attainment: float
    least: dict[WorkerRole, int]
    most: dict[WorkerRole, int]
    manual_until_s: float = 0.0
    silent: tuple[str, ...] = ()
    decisions: tuple[CapacityDecision, ...] = field(default=())


RING_SIZE = 64
"""Changes that the owner keeps."""


SettingValue = str | int | float | bool | None


class OrderKind(StrEnum):
    SCALE = "scale"
    FLIP = "flip"
    WAKE = "wake"
    ROLL = "roll"
    ABORT = "abort"


class ChangeState(StrEnum):
    UNDER_WAY = "under way"
    REACHED = "reached"
    REPLACED = "replaced"  # by a later change, before it was reached
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """How workers differ from their cluster's first settings. `name` is made from the difference; "" for the first
    revision."""

    name: str = ""
    model: str = ""
    settings: dict[str, SettingValue] = field(default_factory=dict)
    files: str = ""

    def __str__(self) -> str:
        if not self.name:
            return "the first revision"
        parts = [f"model {self.model}"] if self.model else []
        parts += [f"{path}={value}" for path, value in sorted(self.settings.items())]
        return f"revision {self.name} ({', '.join(parts) or 'other files of the model'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredFleet:
    counts: dict[WorkerRole, int]
    revision: Revision = field(default_factory=Revision)

    def __str__(self) -> str:
        counts = " + ".join(f"{count} {role}" for role, count in self.counts.items()) or "no workers"
        return f"{counts} at {self.revision}" if self.revision.name else counts

    @property
    def is_asleep(self) -> bool:
        return not any(self.counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOrder:
    """`who` and `why` are for people. SCALE sets the `counts` of the named roles. FLIP gives `worker_id` the
    `role`. WAKE restores the fleet before it fell asleep. ROLL replaces every worker by one with another `model`
    (its path; `files`: the fingerprint of its files) or other `settings`, with `surge` extra workers of each pool
    at a time. ABORT ends the roll."""

    kind: OrderKind
    counts: dict[WorkerRole, int] = field(default_factory=dict)
    worker_id: str = ""
    role: WorkerRole | None = None
    model: str = ""
    files: str = ""
    settings: dict[str, SettingValue] = field(default_factory=dict)
    surge: int = 1
    who: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollProgress:
    """How many workers of each role have the revision `to`, and how many do not."""

    number: int
    to: Revision
    newer: dict[WorkerRole, int]
    older: dict[WorkerRole, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """`at_s`, `ended_s`: seconds since 1970, 0 while the change is under way. `reason`: why it failed, or what
    replaced it."""

    number: int
    kind: OrderKind
    who: str
    why: str
    before: DesiredFleet
    after: DesiredFleet
    at_s: float
    worker_id: str = ""
    state: ChangeState = ChangeState.UNDER_WAY
    ended_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """`serving` counts workers that serve in their role. `waiting_for`: what is missing until the desired fleet is
    reached. `start_s`: the duration of a worker's latest start, 0 while unknown. `changes`: oldest first."""

    desired: DesiredFleet
    serving: dict[WorkerRole, int]
    waiting_for: tuple[str, ...] = ()
    start_s: float = 0.0
    changes: tuple[FleetChange, ...] = ()
    rolling: RollProgress | None = None
    planner: PlannerReport | None = None

    @property
    def reached(self) -> bool:
        return not self.waiting_for


class FleetOwner(Protocol):
    """The one owner of the desired fleet, as a gateway reaches it."""

    async def view(self) -> FleetReport:
        """Raises Unavailable if the owner does not answer, InvalidRequest if there is none."""
        ...

    async def order(self, order: FleetOrder) -> FleetChange:
        """Returns the change once it is recorded, before it is reached. Number 0: nothing to change. Raises
        InvalidRequest for an order that is impossible or does not fit the machines, Unavailable if no owner answers."""
        ...

    async def close(self) -> None: ...


class CapacityOwner(FleetOwner, Protocol):
    """The owner beside what gateways report to it."""

    async def report(self, sight: GatewaySight | None) -> CapacityNews:
        """`sight` is None while the owner needs none. Raises Unavailable."""
        ...

    async def sights(self) -> tuple[SeenSight, ...]:
        """Gateways begin to report with the first call. Raises as `view`."""
        ...


class NoFleetOwner:
    """The owner of workers that were given by address."""

    async def view(self, *_: Any, **__: Any) -> Any:
        raise InvalidRequest(
            "this gateway was given its workers by address, so that it cannot change their number: start workers with "
            "`baton pools` or `baton serve`, or start and stop them yourself"
        )

    order = report = sights = view

    async def close(self) -> None: ...


def scaled(desired: DesiredFleet, counts: Mapping[WorkerRole, int]) -> DesiredFleet:
    """Raises InvalidRequest for a role without a pool, or a count that leaves no worker that decodes."""
    if unknown := [role for role in counts if role not in desired.counts]:
        role, count = unknown[0], max(1, counts[unknown[0]])
        other = f"--workers {count}" if role is WorkerRole.COLOCATED else "--prefill 1 --decode 1"
        possible = " ".join(f"{role}={count}" for role in desired.counts)
        raise InvalidRequest(
            f"{role}={counts[role]}: this cluster has no {role} pool, it has {' and '.join(desired.counts)}: use "
            f"`baton scale {possible}`, or start another cluster with `baton serve {other}`",
            param="counts",
        )
    after = desired.counts | dict(counts)
    check_counts(after)
    return replace(desired, counts=after)


def check_counts(counts: Mapping[WorkerRole, int], most: int = 4096) -> None:
    """Raises InvalidRequest. A fleet without workers is asleep."""
    if not any(counts.values()):
        return
    for role, count in counts.items():
        least = 0 if role is WorkerRole.PREFILL else 1
        if not least <= count <= most:
            why = " (without it no answers are written; with every count 0 the cluster sleeps)" if count == 0 else ""
            raise InvalidRequest(f"{role}={count}: give {least} to {most}{why}", param="counts")


def flipped(desired: DesiredFleet, worker_id: str, roles: Mapping[str, WorkerRole], role: WorkerRole) -> DesiredFleet:
    """Raises InvalidRequest. `roles` are the present ones, by worker id."""
    if worker_id not in roles:
        raise InvalidRequest(
            f"there is no worker {worker_id}: the fleet is {', '.join(roles) or 'empty'}", param="worker_id"
        )
    now = roles[worker_id]
    if WorkerRole.COLOCATED in (now, role):
        raise InvalidRequest(
            f"{worker_id} is a {now} worker and cannot become a {role} worker: only prefill and decode workers change "
            "into each other; a colocated worker does both already",
            param="role",
        )
    if now is role:
        raise InvalidRequest(f"{worker_id} is a {role} worker already", param="role")
    after = desired.counts | {now: desired.counts[now] - 1, role: desired.counts[role] + 1}
    if after[WorkerRole.DECODE] < 1:
        raise InvalidRequest(
            f"{worker_id} is the only decode worker, and prefill workers write no answers: `baton scale decode=2`",
            param="worker_id",
        )
    return replace(desired, counts=after)
