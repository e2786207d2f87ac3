"""Chooses the workers of jobs, records each decision, and learns from its outcome. Policies need no memory of their
own.

Chooser.choose ─▶ policy ─▶ Decision ─▶ Record
        ▲            └─ shadows: the choices of other policies
        └── Predictor ◀── measured times: first token, KV arrived, ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protos.errors import WorkerLost
from protos.event_loop import loop_time
from protos.values import KVEvent
from router.dispatch.job_state import JobState
from router.fleet.fleet import Fleet
from router.jobs import BATCH_PRIORITY, Job
from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, Policy, RequestView, avoiding
from router.routing.pair import kept_candidates
from router.routing.registry import check_names, policy_of, shadow_names
from router.routing.request_seconds import estimate, handed_bytes
from router.traces.cache_misses import EvictionLog
from router.traces.request_trace import DecisionRecord, RequestTrace, RequestTraces
from router.traces.shadow import ShadowPolicy

LEAST_TOKENS = 4  # an answer with fewer tokens is ignored by the predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A router's records of its decisions: traces of requests, evictions, and shadow policies."""

    records: RequestTraces = field(default_factory=RequestTraces)
    evictions: EvictionLog = field(default_factory=EvictionLog)
    shadows: tuple[ShadowPolicy, ...] = ()

    def observe(self, worker_id: str, events: Sequence[KVEvent]) -> None:
        self.evictions.observe(worker_id, events, loop_time())


def routing_of(config: RouterConfig) -> Routing:
    check_names(config)
    shadows = tuple(ShadowPolicy(name, policy_of(config, name)) for name in shadow_names(config))
    return Routing(records=RequestTraces(config.decision_history_size), shadows=shadows)


class Chooser:
    def __init__(self, *, fleet: Fleet, policy: Policy, routing: Routing) -> None:
        self._fleet = fleet
        self._policy = policy
        self._routing = routing
        self._num_decided = 0

    def record(self, job: Job) -> RequestTrace:
        return self._routing.records.of(job)

    def decisions(self, request_id: str) -> tuple[Decision, ...]:
        records = self._routing.records.find(request_id)
        return tuple(choice.decision for record in records for choice in record.choices)

    def choose(self, job_state: JobState, candidates: CandidateTable) -> Decision:
        fleet, record, now = self._fleet, job_state.record, loop_time()
        block_size = fleet.offers.block_size or 1
        hashes = job_state.hashes(block_size)
        view = RequestView(
            request_id=job_state.job.request_id,
            num_tokens=job_state.num_tokens,
            block_size=block_size,
            num_decided=self._num_decided,
            answer_tokens=fleet.offers.predictor.answer_tokens,
            within_s=job_state.first_due_s - now,
            block_bytes=fleet.offers.block_bytes,
            window_bytes=fleet.offers.window_bytes,
            lanes=fleet.offers.predictor.lanes,
        )
        away = job_state.failed | job_state.full
        decision = avoiding(self._policy, away)(view, candidates)
        self._num_decided += 1
        prefill_worker, decode_worker = candidates.pair(decision.prefill, decision.decode)
        expected = estimate(view, prefill_worker, decode_worker)
        shadows = tuple(shadow.consider(view, candidates, decision, expected) for shadow in self._routing.shadows)
        if not record.choices:
            self._routing.records.keep_chain(record, hashes, block_size)
        record.chose(
            DecisionRecord(
                at_s=now,
                view=view,
                candidates=kept_candidates(candidates, decision),
                num_candidates=len(candidates),
                decision=decision,
                prefill_worker=prefill_worker,
                decode_worker=decode_worker,
                estimate=expected,
                shadows=shadows,
            )
        )
        return decision

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def took(self, record: RequestTrace, num_tokens: int, num_cached_tokens: int) -> None:
        """Records tokens sent to the client. The first token shows how fast prompts are computed, except a batch's,
        which waits for others."""
        now = loop_time()
        first = record.timestamps.first_s is None
        record.took(num_tokens, num_cached_tokens, now)
        if first and record.choices and record.job.priority != BATCH_PRIORITY:
            choice = record.choices[-1]
            prefill_worker = choice.prefill_worker
            self._fleet.offers.predictor.saw_first_token(
                prefill_worker.worker_id,
                prefill_worker.role,
                num_tokens=prefill_worker.queued_prefill_tokens
                + choice.view.num_tokens
                - prefill_worker.num_cached_tokens,
                seconds=max(0.0, now - choice.at_s - choice.estimate.load_s),
                now=now,
                on_idle=prefill_worker.num_requests == 0,
            )

    def arrived(self, record: RequestTrace) -> None:
        now, prefilled_s = loop_time(), record.timestamps.prefilled_s
        if prefilled_s is None or not record.choices:
            record.arrived(now)
            return
        choice = record.choices[-1]
        ends = choice.prefill_worker.worker_id, choice.decode_worker.worker_id
        num_bytes = handed_bytes(choice.view, choice.decode_worker)
        waited_s = max(0.0, now - prefilled_s - choice.estimate.tpot_s)
        hidden_s = max(0.0, choice.estimate.transfer_s - waited_s)
        record.arrived(now, kv_bytes=round(num_bytes), hidden_s=round(hidden_s, 6), **self._transport(ends[0]))
        self._fleet.offers.predictor.saw_transfer(*ends, num_bytes=num_bytes, seconds=waited_s, now=now)

    def _transport(self, worker_id: str) -> Mapping[str, str]:
        try:
            lanes = self._fleet.member(worker_id).load.lanes
        except WorkerLost:
            return {}
        transports = {lane.transport for lane in lanes if lane.num_open}
        return {"transport": transports.pop()} if len(transports) == 1 else {}

    def ended(self, record: RequestTrace, outcome: str, message: str = "") -> None:
        """Records the end of a job. The predictor learns from the pace of its answer, unless several workers decoded
        it."""
        now, timestamps = loop_time(), record.timestamps
        record.end(outcome, now, message)
        since = timestamps.arrived_s if timestamps.arrived_s is not None else timestamps.first_s
        num_tokens = timestamps.num_tokens - (timestamps.num_tokens_at_arrival or 1)
        if len(record.choices) != 1 or since is None or timestamps.last_s is None or num_tokens < LEAST_TOKENS:
            return
        decode_worker = record.choices[-1].decode_worker
        self._fleet.offers.predictor.saw_answer(
            decode_worker.worker_id,
            decode_worker.role,
            num_sequences=decode_worker.num_requests + 1,
            num_tokens=timestamps.num_tokens,
            seconds=(timestamps.last_s - since) / num_tokens,
            now=now,
        )
