"""The values between the router's faces (HTTP, gRPC) and its dispatch: one requested sequence, and its tokens.

    face: validate, template, tokenise ──▶ Job ──▶ Generate ──▶ TokenDelta ... ──▶ face: detokenise, stop strings, SSE

A request with n > 1 is n jobs that share a prompt. Strings end here: dispatch and everything below see token ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.codec import Value
from protos.values import Adapter, FinishReason, Logprobs, Profile, SamplingParams, WorkerInfo, WorkerLoad, WorkerStats
from router.streaming.token_sink import TokenSink

BATCH_PRIORITY = -(2**31)
"""Priority of the jobs of batches: on a worker each waits behind every request of people."""


@dataclass(slots=True, eq=False)
class JobClient:
    """The client's end of a job. Its `sink` takes plain tokens ahead of their deltas; `send` tells the worker whether
    the client reads."""

    sink: TokenSink | None = None
    send: Callable[[bool], None] | None = None

    def unread(self, is_unread: bool) -> None:
        if self.send is not None:
            self.send(is_unread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence. `request_id` is unique per job; `group_id` is the client's request it belongs to.

    - `session`: the name of its conversation, if the client gives one, for people
    - `tenant`: the tenant's name, "" without tenants
    - `max_ttft_s`: the job is refused if its first token cannot arrive within this time
    - `due_s`: the same by the loop's clock, set by admission, so that the time in the queue counts
    - `emitted`: tokens of its answer that its client has: it goes on behind them, and no delta repeats them
    - `tells_progress`: deltas report how much of the prompt has been computed
    - `adapter`: the id of a LoRA adapter, which `cache_salt` has in it; "" for the model itself
    - `revision`: of model and settings; only workers that have it get the job
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
    adapter: str = ""
    revision: str = ""
    emitted: tuple[int, ...] = ()
    client: JobClient = field(repr=False, compare=False, default_factory=JobClient)
    _hashes: dict[int, Chain] = field(init=False, repr=False, compare=False, default_factory=dict)

    def hashes(self, block_size: int) -> Chain:
        """Hashes of the prompt's full blocks, under the tenant's salt. Computed once."""
        if block_size not in self._hashes:
            self._hashes[block_size] = chain_hashes(self.prompt_ids, block_size, salt=self.cache_salt)
        return self._hashes[block_size]


class TokenDelta(Value, frozen=True, kw_only=True):
    """New tokens of a job, in order, each once, from any worker; the token that stopped it is the last.

    - `logprobs`: one entry a token, if requested
    - `prompt_logprobs`: of positions 1, 2, ... of the prompt; may be spread over several deltas
    - `num_cached_tokens`: prompt tokens from a prefix cache; set on the delta with the first token
    - `queue_s`: seconds before a worker was chosen; set on the delta with the first token
    - `num_prompt_computed`: prompt tokens done, `num_cached_tokens` of them cached, if the job reports progress; 0: no
      change
    - `embedding`: the pooled vector of the prompt, float32, if requested; on the last delta
    - `num_predicted`, `num_mispredicted`: drafts from the client's prediction that were accepted, and rejected
    - `finish_reason`: STOP or LENGTH on the last delta, None before; a job that fails raises instead
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    num_prompt_computed: int = 0
    embedding: bytes = b""
    num_predicted: int = 0
    num_mispredicted: int = 0


class Generate(Protocol):
    """Runs a job. Closing the generator aborts the job on every worker. Raises BatonError before or after the first
    delta."""

    def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """The workers' answers to an order about an adapter: the adapter of each, or why it refused."""

    done: Mapping[str, Adapter | None]
    failed: Mapping[str, str]


class WorkerView(Protocol):
    """A worker as the fleet sees it. `info` is None until the fleet has connected to it. `tokens_before`: tokens
    computed by then."""

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
    @property
    def tokens_before(self) -> tuple[int, int]: ...


class FleetView(Protocol):
    """The faces' view of the fleet."""

    def ready(self) -> bool: ...

    def asleep(self) -> str:
        """Why requests are served although no worker runs; "" otherwise."""
        ...

    def degraded(self) -> str:
        """Faults despite which requests are served; "" without any."""
        ...

    def stored_as(self, revision: str) -> str:
        """Encodings of a revision's weights and KV: with others, answers may differ."""
        ...

    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that workers have, by name."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        """Loads the adapter on every worker, now or when it connects. Raises the first worker's error if none could
        load it, NoWorkers without a worker."""
        ...

    async def unload_adapter(self, name: str) -> AdapterReport:
        """Raises NotFound if no worker has the adapter, NoWorkers without one."""
        ...

    def status(self) -> Sequence[WorkerView]: ...

    async def stats(self, worker_id: str) -> WorkerStats:
        """Tickets and lanes, queried from the worker. Raises WorkerLost."""
        ...

    async def profile(self, worker_id: str, recording: bool | None = None) -> Profile:
        """The worker's recorded steps; its recording restarts, ends, or continues (None). Raises WorkerLost."""
        ...

    async def drain(self, worker_id: str) -> int:
        """The worker takes no new work. Returns how many requests run on it. Raises NotFound or WorkerLost."""
        ...
