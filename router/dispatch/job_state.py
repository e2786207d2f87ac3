"""The tokens that a job's client has received: any worker can continue from there, and no token is sent twice."""

from __future__ import annotations

import math
from dataclasses import replace

from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.values import GenerateRequest, SequenceUpdate, Ticket
from router.dispatch.poison_requests import CrashHistory
from router.jobs import Job, TokenDelta
from router.streaming.token_sink import TokenSink
from router.traces.request_trace import RequestTrace

LEAST_PROGRESS = 16
"""An answer that has grown by this many tokens since its last failure has all its attempts again."""


class JobState:
    """`output_ids` have been emitted. `num_failures` and `blocked_since_s` (the loop's clock; None while tokens flow)
    bound how long the job is tried; `failed` and `full` are workers to keep away from.
    `unread`: blocks that readers had cached when attempts chose them that ended before it was read.
    `session`: the conversation, once it has been found out.
    `record` notes what happens."""

    def __init__(
        self, job: Job, *, now: float, record: RequestTrace | None = None, sink: TokenSink | None = None
    ) -> None:
        self.job = job
        self.sink = sink
        self.record = record or RequestTrace(job=job, received_s=now)
        self.read_since_s = now  # when a worker was given the prompt
        self._arrival_s = now
        self.output_ids: list[int] = []
        self.num_failures = 0
        self.crashes = CrashHistory()
        self._num_tokens_at_failure = 0
        self.blocked_since_s: float | None = None
        self.failed: set[str] = set()
        self.full: set[str] = set()
        self.unread: dict[str, int] = {}
        self.session: str | None = None
        self._num_ids = 0
        self._num_attempts = 0
        self._num_cached: int | None = None
        self._num_prompt_logprobs = 0  # emitted to the client
        self._num_heard = 0  # of them, sent by the present attempt
        self._hashes: dict[int, tuple[int, Chain]] = {}  # by block size, with the number of output tokens

    @property
    def first_due_s(self) -> float:
        """When the first token must be there, or inf."""
        job = self.job
        if job.max_ttft_s is None or self.output_ids:
            return math.inf
        return self._arrival_s + job.max_ttft_s if job.due_s is None else job.due_s

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything that must be in a KV cache before the next token."""
        return self.job.prompt_ids if not self.output_ids else (*self.job.prompt_ids, *self.output_ids)

    @property
    def num_tokens(self) -> int:
        """The sum over `token_ids`."""
        return len(self.job.prompt_ids) + len(self.output_ids)

    def hashes(self, block_size: int) -> Chain:
        """Hashes of the full blocks of `token_ids`, under the tenant's salt."""
        if not self.output_ids:
            return self.job.hashes(block_size)
        known = self._hashes.get(block_size)
        if known is None or known[0] != len(self.output_ids):
            chain = chain_hashes(self.token_ids, block_size, salt=self.job.cache_salt)
            self._hashes[block_size] = known = len(self.output_ids), chain
        return known[1]

    def failed_again(self) -> None:
        """An attempt has failed. Those before it are forgotten if the answer has grown since."""
        if len(self.output_ids) >= self._num_tokens_at_failure + LEAST_PROGRESS:
            self.num_failures = 0
        self._num_tokens_at_failure = len(self.output_ids)

    def next_attempt(self) -> tuple[str, int]:
        """The `next_id` of an attempt, which computes the prompt from its start."""
        self._num_attempts += 1
        self._num_heard = 0
        return self.next_id()

    def next_id(self) -> tuple[str, int]:
        """(request id on the workers, generation) of an attempt, or of a migration within one. All ids differ, so that
        a late message or transfer of an earlier attempt is not taken for the new one's."""
        self._num_ids += 1
        return f"{self.job.request_id}.{self._num_ids}", self._num_ids

    def know_cached(self, num_tokens: int) -> None:
        """The number of tokens that were cached anywhere at the first attempt's decision. Blocks that a failed attempt
        computed are no cache hit: the client is reported at most this number."""
        if self._num_cached is None:
            self._num_cached = num_tokens

    def request(
        self,
        request_id: str,
        *,
        ticket: Ticket | None = None,
        pull: Ticket | None = None,
        more: tuple[int, ...] = (),
    ) -> GenerateRequest:
        """The rest of the job, after the emitted tokens and `more`."""
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
        )

    @property
    def may_skip_deltas(self) -> bool:
        """True if a sink may take tokens. The first token, and every token of a job suspected of a crash, are
        deltas."""
        return bool(self.output_ids) and not self.crashes.crash_count

    def append(self, update: SequenceUpdate) -> TokenDelta:
        """Records an update; the returned delta has its new tokens."""
        first = not self.output_ids and bool(update.token_ids)
        repeated = self._num_prompt_logprobs - self._num_heard
        self._num_heard += len(update.prompt_logprobs)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._num_heard)
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
            num_cached_tokens=self._told_cached(update.num_cached_tokens) if first or update.num_prompt_computed else 0,
            num_prompt_computed=update.num_prompt_computed,
            queue_s=self.read_since_s - self._arrival_s if first else 0.0,
        )

    def _told_cached(self, num_tokens: int) -> int:
        known = self._num_cached if self._num_attempts > 1 and self._num_cached is not None else num_tokens
        return min(num_tokens, known, len(self.job.prompt_ids))
