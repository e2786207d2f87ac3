"""The tokens of a job that its client has received. Any worker can continue from them, and no token is sent twice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.errors import WorkerLost
from protos.values import GenerateRequest, ReserveRequest, SequenceUpdate, Ticket
from router.dispatch.poison_requests import CrashHistory
from router.fleet.member import Member
from router.jobs import Job, TokenDelta
from router.traces.request_trace import RequestTrace

LEAST_PROGRESS = 16
"""An answer that has grown by this number of tokens since its last failure regains all of its attempts."""


class JobState:
    """The state of a job between attempts.

    - `output_ids`: the emitted tokens.
    - `num_failures`, `blocked_since_s` (the loop's clock; None while tokens flow): bounds of the job's attempts.
    - `failed`, `full`: workers to avoid.
    - `unread`: cached blocks by worker, of attempts that ended before their prompt was prefilled.
    - `record`: the trace of the request.
    """

    def __init__(self, job: Job, *, now: float, record: RequestTrace | None = None) -> None:
        self.job = job
        self.record = record or RequestTrace(job=job, received_s=now)
        self.read_since_s = now  # when a worker got the prompt
        self._arrival_s = now
        self.output_ids: list[int] = list(job.emitted)
        self.num_failures = 0
        self.crashes = CrashHistory()
        self._num_tokens_at_failure = 0
        self.blocked_since_s: float | None = None
        self.failed: set[str] = set()
        self.full: set[str] = set()
        self.unread: dict[str, int] = {}
        self._num_ids = 0
        self._num_attempts = 0
        self._num_cached: int | None = None
        self._num_prompt_logprobs = 0  # emitted to the client
        self._num_received = 0  # of them, sent by the present attempt
        self._hashes: dict[int, tuple[int, Chain]] = {}  # by block size, with the number of output tokens

    @property
    def first_due_s(self) -> float:
        job = self.job
        if job.max_ttft_s is None or self.output_ids:
            return math.inf
        return self._arrival_s + job.max_ttft_s if job.due_s is None else job.due_s

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.job.prompt_ids if not self.output_ids else (*self.job.prompt_ids, *self.output_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.job.prompt_ids) + len(self.output_ids)

    def hashes(self, block_size: int) -> Chain:
        if not self.output_ids:
            return self.job.hashes(block_size)
        entry = self._hashes.get(block_size)
        if entry is None or entry[0] != len(self.output_ids):
            chain = chain_hashes(self.token_ids, block_size, salt=self.job.cache_salt)
            self._hashes[block_size] = entry = len(self.output_ids), chain
        return entry[1]

    def failed_again(self) -> None:
        if len(self.output_ids) >= self._num_tokens_at_failure + LEAST_PROGRESS:
            self.num_failures = 0
        self._num_tokens_at_failure = len(self.output_ids)

    def next_attempt(self) -> tuple[str, int]:
        self._num_attempts += 1
        self._num_received = 0
        return self.next_id()

    def next_id(self) -> tuple[str, int]:
        """(request id on the workers, generation) of an attempt, or of a migration within one. All ids differ, so that
        a late message of an earlier attempt is not mistaken for the new one's."""
        self._num_ids += 1
        return f"{self.job.request_id}.{self._num_ids}", self._num_ids

    def know_cached(self, num_tokens: int) -> None:
        """Sets the number of tokens that any worker had cached at the first decision. The client is reported at most
        this number: blocks computed by a failed attempt are no cache hit."""
        if self._num_cached is None:
            self._num_cached = num_tokens

    def request(
        self, request_id: str, *, ticket: Ticket | None = None, pull: Ticket | None = None, more: tuple[int, ...] = ()
    ) -> GenerateRequest:
        job, output_ids = self.job, (*self.output_ids, *more)
        return GenerateRequest(
            request_id=request_id,
            prompt_ids=job.prompt_ids,
            output_ids=output_ids,
            sampling=replace(job.sampling, prompt_logprobs=None) if output_ids else job.sampling,
            priority=job.priority,
            cache_salt=job.cache_salt,
            ticket=ticket,
            pull=pull,
            tells_progress=job.tells_progress and not output_ids,
            adapter=job.adapter,
        )

    @property
    def may_skip_deltas(self) -> bool:
        """True if a sink may receive tokens directly. The first token, and every token of a job suspected of a crash,
        must be deltas."""
        return bool(self.output_ids) and not self.crashes.crash_count

    def append(self, update: SequenceUpdate) -> TokenDelta:
        first = not self.output_ids and bool(update.token_ids)
        repeated = self._num_prompt_logprobs - self._num_received
        self._num_received += len(update.prompt_logprobs)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._num_received)
        self.output_ids += update.token_ids
        if update.token_ids:
            self.blocked_since_s = None
            self.full.clear()
            self.unread.clear()
        reason = update.finish_reason
        return TokenDelta(
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs[repeated:],
            finish_reason=reason if reason is not None and reason.is_last else None,
            num_cached_tokens=self._cached(update.num_cached_tokens) if first or update.num_prompt_computed else 0,
            num_prompt_computed=update.num_prompt_computed,
            embedding=update.embedding,
            num_predicted=update.num_predicted,
            num_mispredicted=update.num_mispredicted,
            queue_s=self.read_since_s - self._arrival_s if first else 0.0,
        )

    def _cached(self, num_tokens: int) -> int:
        most = self._num_cached if self._num_attempts > 1 and self._num_cached is not None else num_tokens
        return min(num_tokens, most, len(self.job.prompt_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservations:
    gateway_id: str
    lease_s: float

    def __call__(
        self,
        job_state: JobState,
        source: Member,
        request_id: str,
        generation: int,
        *,
        stop: int | None = None,
        num_tokens: int = 0,
    ) -> ReserveRequest:
        """Blocks for the first `stop` tokens, into which `source` writes; with `num_tokens` for so many in all."""
        if source.info is None:
            raise WorkerLost(f"worker {source.worker_id} has never been connected")
        return ReserveRequest(
            request_id=request_id,
            prompt_ids=job_state.token_ids[:stop],
            cache_salt=job_state.job.cache_salt,
            generation=generation,
            lease_s=self.lease_s,
            source=source.info.lane,
            source_layout=source.info.layout,
            gateway_id=self.gateway_id,
            num_tokens=num_tokens,
        )
