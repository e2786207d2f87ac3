"""The nouns between the router's faces (HTTP, gRPC) and its dispatch: one sequence asked for, and what comes of it.

    face: validate, template, tokenise ──▶ Job ──▶ Generate ──▶ TokenDelta ... ──▶ face: detokenise, stop strings, SSE

A request with n > 1 is n jobs that share a prompt. Strings end here: dispatch and everything below see token ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.value import Value
from protos.values import FinishReason, Logprobs, Profile, SamplingParams, WorkerInfo, WorkerLoad, WorkerStats
from router.streaming.token_sink import TokenSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence. `request_id` is unique per job; `group_id` is the client's request it belongs to.

    Jobs of one `session` are turns of one conversation, as far as the client has said. `tenant` is who asked, "" where
    nobody is asked. A first token that cannot come within `max_ttft_s` is not worth waiting for: the job is refused.
    `due_s` is when, by the loop's clock, once admission has seen the job; what it waits in line counts.
    With `tells_progress` deltas say how far the prompt is read.
    """

    request_id: str
    group_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    priority: int = 0
    session: str = ""
    tenant: str = ""
    max_ttft_s: float | None = None
    due_s: float | None = None
    tells_progress: bool = False
    _hashes: dict[int, Chain] = field(init=False, repr=False, compare=False, default_factory=dict)

    def hashes(self, block_size: int) -> Chain:
        """Of the prompt's full blocks, under the tenant's salt. Worked out once, whoever asks."""
        if block_size not in self._hashes:
            self._hashes[block_size] = chain_hashes(self.prompt_ids, block_size, salt=self.cache_salt)
        return self._hashes[block_size]


class TokenDelta(Value, frozen=True, kw_only=True):
    """New tokens of a job, in order, each once, whatever workers made them; the token that stopped it is the last.

    `logprobs` has one entry a token when asked for. `prompt_logprobs` are of positions 1, 2, ... of the prompt and
    may be spread over several deltas. `num_cached_tokens` of the prompt came from a prefix cache and `queue_s` seconds
    went by before a worker was chosen; both are set on the delta with the first token.
    `num_prompt_computed` tokens of the prompt are read, `num_cached_tokens` of them found, where the job tells its
    progress; 0: nothing new of it.
    `finish_reason` is STOP or LENGTH on the last delta and None before; a job that fails raises instead.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    num_prompt_computed: int = 0


class Generate(Protocol):
    """Runs a job. Closing the generator early (a client that left, a stop string found) aborts it on every worker.

    A `sink` takes plain tokens ahead of the deltas that account for them. Raises BatonError: NoWorkers, Overloaded,
    WorkerLost and the like, before or after the first delta.
    """

    def __call__(self, job: Job, sink: TokenSink | None = None) -> AsyncGenerator[TokenDelta, None]: ...


class WorkerView(Protocol):
    """A worker as the fleet sees it. `state` is a word for people, `reason` why it is not ready; `info` is what the
    worker said of itself, None until it was met."""

    @property
    def worker_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def info(self) -> WorkerInfo | None: ...
    @property
    def load(self) -> WorkerLoad: ...


class FleetView(Protocol):
    """What the faces may know of the fleet: whether a request would be served now, and who is there (dataclasses)."""

    def ready(self) -> bool: ...

    def degraded(self) -> str:
        """What is amiss although requests are served; "" when nothing is."""
        ...

    def status(self) -> Sequence[WorkerView]: ...

    async def stats(self, worker_id: str) -> WorkerStats:
        """Tickets and lanes, asked of the worker itself. Raises WorkerLost."""
        ...

    async def profile(self, worker_id: str, recording: bool | None = None) -> Profile:
        """What the worker has recorded of its steps; then it begins anew, ends, or goes on as before (None). Raises
        WorkerLost."""
        ...

    async def drain(self, worker_id: str) -> int:
        """The worker takes no new work, and ends when nothing runs on it; how many requests do. Raises NotFound or
        WorkerLost."""
        ...
