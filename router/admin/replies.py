"""The replies of /admin, as the API's description shows them. Values of the fleet and of the policies describe
themselves."""

from __future__ import annotations

from typing import Any, Literal

from protos.values import LaneStats, ModelDigests, Profile, TicketStats, TierStats, WorkerRole
from router.fleet.worker import WorkerStatus
from router.fleet_owner import ChangeState, DesiredFleet, FleetChange, OrderKind, RollProgress
from router.openai.responses import Reply
from router.planning import PlannerReport
from router.policies.base import SingleWorkerReason
from router.policies.costs import LatencyEstimate
from router.policies.table import Candidate
from router.traces.cache_misses import CacheMissReport


class Held(Reply):
    tickets: list[TicketStats]
    lanes: list[LaneStats]
    tiers: list[TierStats]


class CapacityReply(Reply):
    """`waiting_for`: phrases for what is missing until the desired fleet is reached; `start_s`: how long starts of
    workers took lately, 0 while unknown; `changes`: oldest first; `rolling`: the roll that is under way, or null;
    `planner`: null without one."""

    desired: DesiredFleet
    serving: dict[WorkerRole, int]
    waiting_for: list[str]
    start_s: float
    changes: list[FleetChange]
    rolling: RollProgress | None
    planner: PlannerReport | None


class SightsReply(Reply):
    """What each gateway process saw, and how many seconds ago it reported."""

    sights: list[Any]


class StatusReply(Reply):
    """`models`: every model behind this address; the rest is of the first one, `model`.

    `kv` is null for a worker that does not answer in time, `capacity` for an owner of the fleet that does not.
    `processes`: the port of each of several gateway processes. `asleep`: what a request waits for while there are no
    workers; "" while it is awake. `digests`: of the model's files as the gateway reads them, by revision.
    `troubles`: of the gateway itself, the part of `degraded` that is of no worker."""

    model: str
    digests: dict[str, ModelDigests]
    models: list[str]
    ready: bool
    degraded: str
    troubles: list[str]
    reason: str
    asleep: str
    workers: list[WorkerStatus]
    kv: dict[str, Held | None]
    processes: list[int]
    capacity: CapacityReply | None


class LaneReadingReply(Reply):
    """KV of `num_tokens` tokens: `seconds` from the call that pushes it to the destination's answer, `computed_s` to
    compute it and answer at the source, `lane_s` in which the lane was busy. `same`: both answers agree."""

    num_tokens: int
    num_bytes: int
    seconds: float
    computed_s: float
    same: bool
    transport: str
    lane_s: float


class HeldByWorker(Reply):
    worker_id: str
    state: str
    tickets: list[TicketStats] | None
    lanes: list[LaneStats] | None
    tiers: list[TierStats] | None


class KVReply(Reply):
    num_tickets: int
    num_bytes_reserved: int
    oldest_s: float
    workers: list[HeldByWorker]


class ChangeReply(Reply):
    """Number 0: the fleet is so already. `state` is "under way", "reached", "replaced" by a later change, or "failed"
    for the `reason`."""

    number: int
    kind: OrderKind
    who: str
    why: str
    before: DesiredFleet
    after: DesiredFleet
    at_s: float
    worker_id: str
    state: ChangeState
    ended_s: float
    reason: str


class DrainReply(Reply):
    worker_id: str
    num_running: int


class HistoryPoint(Reply):
    """A period that ended at `at`. A figure of which nothing was measured is null. `tpot`: the time between two tokens
    of an answer. `kv_use` and `ready` by pool: the share of KV blocks in use, and the workers that take work."""

    at: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float | None
    waiting: int
    worker_waiting: int
    in_flight: int
    kv_use: dict[str, float]
    ready: dict[str, int]


class HistoryReply(Reply):
    """The latest hour of this gateway, oldest first."""

    period_s: int
    points: list[HistoryPoint]


class RequestSummary(Reply):
    request_id: str
    job: str
    received_at: float
    state: Literal["waiting", "running", "ended"]
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_drafts: int
    paused_drafts: list[str]
    ttft_s: float | None
    tpot_s: float | None
    seconds: float | None
    policy: str | None
    prefill: str | None
    decode: str | None
    embedding: bool
    decisions: int
    failures: int


class RequestsReply(Reply):
    requests: list[RequestSummary]


class Measured(Reply):
    ttft_s: float | None
    ttft_error_s: float | None
    tpot_s: float | None
    tpot_error_s: float | None


class ScoreView(Reply):
    worker_id: str
    role: str
    total: float
    terms: dict[str, float]


class ShadowChoice(Reply):
    policy: str
    prefill: str | None
    decode: str | None
    expected: LatencyEstimate
    ttft_difference_s: float


class ChoiceView(Reply):
    """`candidates`: the workers as they were at the decision; of many only the cheapest, the chosen, and the one with
    most of the prompt cached. `num_candidates` counts them all."""

    at_s: float
    policy: str
    prefill: str | None
    decode: str | None
    single_worker: SingleWorkerReason | None
    expected: LatencyEstimate
    scores: list[ScoreView]
    candidates: list[Candidate]
    num_candidates: int
    shadows: list[ShadowChoice]
    measured: Measured | None


class RequestDetail(RequestSummary):
    """Each entry of `timeline` has `at_s`, `what`, and what belongs to it."""

    message: str
    session: str
    choices: list[ChoiceView]
    timeline: list[dict[str, Any]]


class RequestReply(Reply):
    request_id: str
    jobs: list[RequestDetail]


class ExplainedJob(Reply):
    job: str
    prompt_tokens: int
    miss: CacheMissReport


class CacheReply(Reply):
    request_id: str
    jobs: list[ExplainedJob]


class ShadowTally(Reply):
    policy: str
    decisions: int
    prompt_tokens: int
    agreement: float
    predicted_ttft_s: float
    taken_predicted_ttft_s: float
    ttft_difference_s: float
    hit_rate: float
    taken_hit_rate: float
    hit_difference: float


class ShadowsReply(Reply):
    shadows: list[ShadowTally]


class WorkerProfile(Reply):
    """`profile` is null for a worker that does not answer."""

    worker_id: str
    profile: Profile | None


class ProfileReply(Reply):
    workers: list[WorkerProfile]
