"""Recent requests for `baton why` and /admin: every decision with all its costs, and a timeline. Bounded.

face: open ──▶ Record ◀── note, chose, took, end: the dispatcher, as it goes
                 └─▶ Records.find, Records.recent: /admin/requests
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.codec import Value
from protos.errors import BatonError, Cancelled, code_of
from protos.event_loop import loop_time
from router.jobs import Job
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.decision import Decision, RequestView
from router.routing.request_seconds import LatencyEstimate

MAX_CHOICES = 16  # of one request; a longer one keeps its last choices
MAX_EVENTS = 64
MAX_CHUNKS = 32
MAX_CHAIN_BYTES = 32 * 2**20  # of block hashes, of all requests together: two million blocks

Fact = str | int | float


class EventKind(StrEnum):
    ARRIVED = "arrived"
    RECEIVED = "received"
    ADMITTED = "admitted"
    DECIDED = "decided"
    RESERVED = "blocks reserved"
    SUBMITTED = "prompt sent"
    FIRST_TOKEN = "first token"
    CHUNK = "part of the prompt computed"
    PREFILLED = "prompt computed"
    KV_ARRIVED = "KV arrived"
    PULLED = "prefix pulled"
    MOVED = "moved with its KV"
    FAILED = "attempt failed"
    ENDED = "ended"


class TraceEvent(Value, frozen=True, kw_only=True):
    """`at_s` by the event loop's clock."""

    what: EventKind
    at_s: float
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowDecision:
    """Another policy's decision about the same choice."""

    decision: Decision
    estimate: LatencyEstimate


class DecisionRecord(Value, frozen=True, kw_only=True):
    """One decision and its inputs. `candidates` are those that `pair.kept_candidates` returns. If the decode worker
    also prefills, it is the `prefill_worker`, too."""

    at_s: float
    view: RequestView
    candidates: CandidateTable
    num_candidates: int
    decision: Decision
    prefill_worker: Candidate
    decode_worker: Candidate
    estimate: LatencyEstimate
    shadows: tuple[ShadowDecision, ...] = ()

    def candidate(self, worker_id: str) -> Candidate:
        return self.candidates.candidate(worker_id)


@dataclass(slots=True, kw_only=True)
class Timestamps:
    """Moments of a request, None until they happen."""

    first_s: float | None = None
    prefilled_s: float | None = None
    arrived_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    num_chunks: int = 0
    num_tokens: int = 0
    num_tokens_at_arrival: int = 0
    num_cached_tokens: int = 0
    num_drafted: int = 0  # tokens that workers verified, and accepted
    num_accepted: int = 0
    paused_drafts: tuple[str, ...] = ()  # sources paused on the worker of the last token


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTrace:
    """One job's events and decisions, written by the event loop it runs on. `chain` has the hashes of its prompt's full
    blocks, empty where they are not kept any more; `opening` is the hash of the first block without a salt."""

    job: Job  # without its prompt after its end
    received_s: float
    arrived_s: float = field(init=False)
    num_prompt_tokens: int = field(init=False)
    chain: Chain = field(default_factory=Chain)
    opening: bytes = b""
    block_size: int = 0
    choices: deque[DecisionRecord] = field(default_factory=lambda: deque(maxlen=MAX_CHOICES))
    events: deque[TraceEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    timestamps: Timestamps = field(default_factory=Timestamps)
    num_failures: int = 0
    outcome: str = ""
    message: str = ""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.job.prompt_ids)
        self.arrived_s = self.received_s

    @property
    def reading(self) -> DecisionRecord:
        """The decision whose prefill worker made the first token; while there is no token, the latest."""
        first_s = self.timestamps.first_s
        before = (choice for choice in reversed(self.choices) if first_s is None or choice.at_s <= first_s)
        return next(before, self.choices[0])

    def note(self, what: EventKind, now: float, **facts: Fact) -> None:
        self.events.append(TraceEvent(what=what, at_s=now, facts=facts))

    def chose(self, choice: DecisionRecord) -> None:
        self.choices.append(choice)
        decision = choice.decision
        facts: dict[str, Fact] = {"single_worker": str(decision.single_worker)} if decision.single_worker else {}
        if choice.estimate.num_host_tokens:
            facts["host_tokens"] = choice.estimate.num_host_tokens
        prefill, decode = decision.prefill or "", self.decodes_at(decision) or ""
        self.note(EventKind.DECIDED, choice.at_s, prefill=prefill, decode=decode, **facts)

    def decodes_at(self, decision: Decision) -> str | None:
        """No worker decodes a vector or labels that a prefill worker computes."""
        return None if decision.prefill is not None and not self.job.sampling.needs_decode else decision.decode

    def took(self, num_tokens: int, num_cached_tokens: int, now: float) -> None:
        timestamps = self.timestamps
        if timestamps.first_s is None:
            timestamps.first_s = now
            timestamps.num_cached_tokens = num_cached_tokens
            self.note(EventKind.FIRST_TOKEN, now, cached_tokens=num_cached_tokens)
        timestamps.last_s = now
        timestamps.num_tokens += num_tokens

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        self.timestamps.num_drafted += num_drafted
        self.timestamps.num_accepted += num_accepted

    def computed(self, num_tokens: int, now: float) -> None:
        """Only the first `MAX_CHUNKS` chunks are noted."""
        if self.timestamps.num_chunks < MAX_CHUNKS:
            self.timestamps.num_chunks += 1
            self.note(EventKind.CHUNK, now, tokens=num_tokens)

    def prefilled(self, now: float) -> None:
        self.timestamps.prefilled_s = now
        self.note(EventKind.PREFILLED, now)

    def arrived(self, now: float, **facts: Fact) -> None:
        """`facts` are the transfer's."""
        self.timestamps.arrived_s = now
        self.timestamps.num_tokens_at_arrival = self.timestamps.num_tokens
        self.note(EventKind.KV_ARRIVED, now, **facts)

    def failed(self, error: BatonError, now: float) -> None:
        self.num_failures += 1
        self.note(EventKind.FAILED, now, code=error.code, message=error.message, tokens=self.timestamps.num_tokens)

    def end(self, outcome: str, now: float, message: str = "") -> None:
        """`outcome` is a finish reason or an error's code. Later calls change nothing."""
        if self.timestamps.ended_s is not None:
            return
        self.outcome, self.message = outcome, message
        self.timestamps.ended_s = now
        self.note(EventKind.ENDED, now, reason=outcome, tokens=self.timestamps.num_tokens)
        self.job = replace(self.job, prompt_ids=())


class RequestTraces:
    """The last `capacity` requests, found by the client's id (`x-baton-request-id`), the answer's id or a job's."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._ring: deque[RequestTrace] = deque()
        self._named: dict[str, list[RequestTrace]] = {}
        self._chained: deque[RequestTrace] = deque()
        self._chain_bytes = 0

    def open(self, jobs: Iterable[Job], *, arrived_s: float | None = None) -> Sequence[RequestTrace]:
        now, opened = loop_time(), []
        for job in jobs:
            record = RequestTrace(job=job, received_s=now)
            if arrived_s is not None:
                record.arrived_s = arrived_s
                record.note(EventKind.ARRIVED, arrived_s)
            record.note(EventKind.RECEIVED, now, prompt_tokens=len(job.prompt_ids), max_tokens=job.sampling.max_tokens)
            self._ring.append(record)
            opened.append(record)
            for name in _names(job):
                self._named.setdefault(name, []).append(record)
            while len(self._ring) > self._capacity:
                self._forget(self._ring.popleft())
        return opened

    def close(self, jobs: Iterable[Job], error: BaseException | None) -> None:
        outcome, message = _outcome(error)
        for job in jobs:
            if (record := self._record(job)) is not None:
                record.end(outcome, loop_time(), message)

    def of(self, job: Job) -> RequestTrace:
        """Opens the job's record if no face has done so."""
        if (record := self._record(job)) is None:
            self.open([job])
            record = self._ring[-1]
        return record

    def keep_chain(self, record: RequestTrace, chain: Chain, block_size: int) -> None:
        """Beyond `MAX_CHAIN_BYTES` the oldest chains are dropped."""
        record.chain, record.block_size = chain, block_size
        if not chain:
            return
        record.opening = bytes(chain[:1].packed)
        if record.job.cache_salt:
            record.opening = chain_hashes(record.job.prompt_ids[:block_size], block_size).packed
        self._chained.append(record)
        self._chain_bytes += len(chain.packed)
        while self._chain_bytes > MAX_CHAIN_BYTES and len(self._chained) > 1:
            oldest = self._chained.popleft()
            self._chain_bytes -= len(oldest.chain.packed)
            oldest.chain = Chain()

    def find(self, name: str) -> Sequence[RequestTrace]:
        """Oldest first; empty for an unknown or forgotten name."""
        return tuple(self._named.get(name, ()))

    def recent(self, count: int) -> Sequence[RequestTrace]:
        """Newest first."""
        return tuple(islice(reversed(self._ring), count))

    def before(self, record: RequestTrace) -> Iterable[RequestTrace]:
        """Earlier requests, the latest first."""
        is_earlier = False
        for other in reversed(self._ring):
            if is_earlier:
                yield other
            is_earlier = is_earlier or other is record

    def _record(self, job: Job) -> RequestTrace | None:
        return next((trace for trace in self._named.get(job.request_id, ()) if trace.job is job), None)

    def _forget(self, record: RequestTrace) -> None:
        for name in _names(record.job):
            self._named[name].remove(record)
            if not self._named[name]:
                del self._named[name]
        if record.chain:
            self._chain_bytes -= len(record.chain.packed)
            self._chained.remove(record)


def _names(job: Job) -> set[str]:
    answer, _, number = job.request_id.rpartition("-")
    return {job.group_id, job.request_id, *([answer] if answer and number.isdigit() else [])}


def _outcome(error: BaseException | None) -> tuple[str, str]:
    if error is None:
        return "stop", "a stop string was found"
    if isinstance(error, BatonError):
        return error.code, error.message
    code = code_of(error)
    return code, "the client went away" if code == Cancelled.code else "a bug of ours: the log has it"
