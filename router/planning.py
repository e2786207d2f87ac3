"""Reports of gateways to the planner, and of the planner to people, as values.

gateway ─ GatewaySight ─▶ CapacityOwner ─▶ planner ─ FleetOrder ─▶ FleetOwner
   ▲                          │
   └────── CapacityNews ──────┘        PlannerReport ─▶ /admin/capacity, `baton why --capacity`
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from protos.values import WorkerRole


class RequestSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request. Moments by the clock of its gateway's event loop, None until then. `failed`: it ended without an
    answer, and not because its client left."""

    received_s: float
    first_s: float | None
    last_s: float | None
    ended_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    failed: bool


class WorkerSight(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's latest load. `num_kv_tokens`: the tokens that its KV memory holds; `decode_step_s` and
    `prefill_tokens_per_s` are 0 while they are unknown."""

    worker_id: str
    role: WorkerRole
    state: str
    num_running: int
    queued_prefill_tokens: int
    decode_step_s: float
    prefill_tokens_per_s: float
    num_kv_tokens: int


class GatewaySight(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process's view of the `covered_s` seconds before `now_s`, by its event loop's clock.

    - `num_arrived`: requests that came, refused ones included
    - `num_waiting`: requests in line now
    - `samples`: the requests that ended or run; of many an even part
    """

    gateway_id: str
    now_s: float
    covered_s: float
    num_arrived: int
    num_waiting: int
    samples: tuple[RequestSample, ...]
    workers: tuple[WorkerSight, ...]


class CapacityNews(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a gateway's report. `period_s`: until its next report is due; `window_s`: seconds that it shall
    cover, 0 while no one needs any."""

    period_s: float
    window_s: float
    desired: dict[WorkerRole, int]


class SeenSight(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's latest report, `age_s` seconds old."""

    sight: GatewaySight
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCounts:
    """A fleet that the planner weighed. `attainment`: the share of the requests that it would serve in time; `cost` in
    device seconds over the planner's horizon, with those of getting there."""

    counts: dict[WorkerRole, int]
    attainment: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityDecision:
    """One decision of the planner. `at_s`: seconds since 1970. `counts`: the fleet that it wants, `desired` the one
    before. `change`: the number of the change that it ordered, 0 for none; `refused`: why its order was not taken.

    `attainment`, `arrival_rate` (requests a second) and `num_waiting` are what clients saw.
    """

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
    """A planner at work. Objectives in seconds; `least` and `most` workers by role. `manual_until_s`: an operator's
    change is left alone until then (seconds since 1970; 0: there is none). `silent`: gateways whose reports are late;
    while there are some, no worker goes. `decisions`: the latest, oldest first."""

    ttft_s: float
    tpot_s: float
    attainment: float
    least: dict[WorkerRole, int]
    most: dict[WorkerRole, int]
    manual_until_s: float = 0.0
    silent: tuple[str, ...] = ()
    decisions: tuple[CapacityDecision, ...] = field(default=())
