"""The planner's observation, objective, limits and memory. Times are seconds since 1970."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.values import WorkerRole
from router.fleet_owner import WeighedCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObservation:
    """The workers of one role.

    - `pending_since_s`: when each missing worker was ordered
    - `num_leaving`: workers that drain or change their role
    - `prefill_tokens_per_s`: of one worker, 0 if unknown
    - `step_fixed_s`, `step_each_s`: the time between tokens is fixed + each * running sequences of a worker
    - `num_seats`: sequences that one worker runs at once
    """

    serving: int
    pending_since_s: tuple[float, ...] = ()
    num_leaving: int = 0
    prefill_tokens_per_s: float = 0.0
    step_fixed_s: float = 0.0
    step_each_s: float = 0.0
    num_seats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The `window_s` before `at_s`, over all gateways.

    - `num_late`: of `num_ended`; they missed an objective, failed, or were refused
    - `num_slow`: late requests whose first token came in time
    - `uncached_tokens`: quantiles
    - `num_silent`: gateways whose reports are late or too short
    """

    at_s: float
    window_s: float
    num_arrived: int
    num_ended: int
    num_late: int
    num_waiting: int
    uncached_tokens: tuple[float, ...]
    answer_tokens: float
    pools: Mapping[WorkerRole, PoolObservation]
    num_slow: int = 0
    num_silent: int = 0

    @property
    def attainment(self) -> float:
        """1 without requests."""
        return 1.0 - self.num_late / self.num_ended if self.num_ended else 1.0

    @property
    def num_begun(self) -> int:
        """Ended requests whose first token came in time."""
        return self.num_ended - self.num_late + self.num_slow

    @property
    def arrival_rate(self) -> float:
        return self.num_arrived / self.window_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObjective:
    """`attainment`: share of the requests with a first token within `ttft_s`, queueing included, and tokens `tpot_s`
    apart on average."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """`devices`: of one worker of a role."""

    least: Mapping[WorkerRole, int]
    most: Mapping[WorkerRole, int]
    devices: Mapping[WorkerRole, int]
    max_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPace:
    """- `settle_s`: fewer workers must have sufficed for this long
    - `rest_s`: between two changes that make the fleet smaller
    - `stale_s`: an older observation decides nothing
    - `horizon_s`: over which actions are paid
    - `backlog_s`: within which the line shall be served
    - `expire_starts`: a worker is given up after this many starts' time
    """

    settle_s: float = 300.0
    rest_s: float = 900.0
    stale_s: float = 60.0
    horizon_s: float = 1800.0
    backlog_s: float = 20.0
    expire_starts: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTimes:
    start_s: float = 60.0
    drain_s: float = 30.0
    flip_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFactors:
    """Measured load over the model's."""

    prefill: float = 1.0
    decode: float = 1.0


AS_MODELLED = LoadFactors()


@dataclass(frozen=True, slots=True, kw_only=True)
class TooSmall:
    """A fleet that did not keep the objective at this load. `hold_s` doubles each time. Rates are tokens a second."""

    counts: Mapping[WorkerRole, int]
    prompt_rate: float
    answer_rate: float
    at_s: float
    hold_s: float

    @property
    def until_s(self) -> float:
        return self.at_s + self.hold_s

    def has(self, counts: Mapping[WorkerRole, int]) -> bool:
        """Whether a fleet is no larger than this one in any role."""
        return all(count <= self.counts.get(role, 0) for role, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedLoad:
    """`factors`: by which the model is wrong. `profile`: requests a second by quarter of an hour of the day, 0 if
    unknown."""

    factors: LoadFactors = AS_MODELLED
    profile: tuple[float, ...] = (0.0,) * 96
    too_small: tuple[TooSmall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerMemory:
    """`serving`: at the last look. `explained_s`: earlier requests correct no factor. `peaks`: (second, requests a
    second). `gave_up_until_s`: no more workers of a role are ordered until then."""

    learned: LearnedLoad = field(default_factory=LearnedLoad)
    serving: Mapping[WorkerRole, int] = field(default_factory=dict)
    explained_s: float = -math.inf
    peaks: tuple[tuple[float, float], ...] = ()
    shrunk_s: float = -math.inf
    manual_until_s: float = 0.0
    gave_up_until_s: Mapping[WorkerRole, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """`flips`: workers that change from one role to another. `weighed`: the best fleets, cheapest first."""

    at_s: float
    counts: Mapping[WorkerRole, int]
    reason: str
    flips: Mapping[tuple[WorkerRole, WorkerRole], int] = field(default_factory=dict)
    weighed: tuple[WeighedCounts, ...] = ()
    memory: PlannerMemory
