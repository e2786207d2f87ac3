"""The replies of /admin, as the API's description shows them. Values of the fleet and of the policies describe
themselves."""

from __future__ import annotations

from typing import Any, Literal

from protos.values import LaneStats, Profile, TicketStats, TierStats
from router.fleet.worker import WorkerStatus
from router.openai.responses import Reply
from router.policies.base import SingleWorkerReason
from router.policies.costs import LatencyEstimate
from router.policies.table import Candidate
from router.replicas.peers import ProcessStatus
from router.traces.cache_misses import CacheMissReport


class Held(Reply):
    tickets: list[TicketStats]
    lanes: list[LaneStats]
    tiers: list[TierStats]


class StatusReply(Reply):
    """`kv` is null for a worker that does not answer in time. `processes`: the gateway's processes; empty if it is one
    process."""

    model: str
    ready: bool
    degraded: str
    reason: str
    workers: list[WorkerStatus]
    kv: dict[str, Held | None]
    processes: list[ProcessStatus]


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


class DrainReply(Reply):
    worker_id: str
    num_running: int


class RequestSummary(Reply):
    request_id: str
    job: str
    received_at: float
    state: Literal["waiting", "running", "ended"]
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    seconds: float | None
    policy: str | None
    prefill: str | None
    decode: str | None
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
