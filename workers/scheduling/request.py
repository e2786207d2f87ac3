"""One sequence in an engine: the scheduler's only mutable object.

Positions of its tokens, and where they are computed::

    0 ........ num_cached ........ num_computed ........ num_planned ........ num_tokens ........ num_expected
    |  prefix cache  |  by this engine  |  by steps in flight  |  still to plan  |  being sampled in flight  |
    |<----------------------- prompt_ids ----------------------->|<- output_ids ->|

Steps in flight are planned and not applied. Without any, num_planned == num_computed and num_expected == num_tokens;
with some, num_planned may lie beyond num_tokens: the device can compute a token that the host does not know yet.

`block_ids[i]` holds positions [i * block_size, (i + 1) * block_size). Every id in it is one reference of the block
pool. The scheduler takes it when the block is matched, allocated or adopted, and releases it once, when the request
ends or is preempted. The blocks of a step in flight stay taken until it ends. A sequence decodes when exactly one
token, the last, is still to plan. A preempted sequence starts again at 0, with its blocks that are still cached.

`tables` has such a list for each group of layers; `block_ids` is the first. In group g the first `num_passed[g]` pages
lie behind the window of position `num_computed`: they are given back when a step has been applied, and no step that is
in flight then reads them, since all of those begin at `num_computed` or later. Pages of a window are taken up to
the worst moment of a prompt (`kvtransfer.windows`), then as steps need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from protos.values import BlockHash, GenerateRequest, SamplingParams, Ticket
from workers.batch import is_penalised


class State(Enum):
    WAITING = auto()  # not admitted yet, preempted, or paused for a time slice
    RUNNING = auto()  # has blocks, is in the batch
    HELD = auto()  # computed; a transfer still reads its blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A sequence in the scheduler.

    `hashes` are the chained hashes of the full blocks of prompt and output known so far; `num_sealed` of them are
    registered in the pool as cached prefix. `rank` orders requests: the smallest goes first, the largest is preempted
    first. A request with `adopted` has blocks from a reservation, or blocks that it kept during a pause.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    priority: int = 0
    ticket: Ticket | None = None
    pull: Ticket | None = None
    adapter: str = ""
    tells_progress: bool = False  # the client gets updates while its prompt is computed
    text_only: bool = False  # no stop ids, logprobs, penalties or grammar: all its decode steps are alike
    arrival_s: float = 0.0
    since_s: float = 0.0  # when it began to wait or to run
    awaits_slot: bool = False  # waits because `max_num_seqs` other sequences run
    is_unread: bool = False  # its client reads nothing now
    rank: tuple[float, int] = (0.0, 0)
    output_ids: list[int] = field(default_factory=list)
    state: State = State.WAITING
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    num_passed: list[int] = field(default_factory=lambda: [0])
    partial_pages: tuple[int, ...] = ()  # pages without positions before a window: never cached
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_due: int = 0  # tokens that steps in flight sample
    num_drafts: int = 0  # drafted tokens of its row in flight
    num_cached: int = 0  # tokens found at its first admission: a recomputation saves nothing
    prefix_savings: int = 0  # tokens that were cached or being computed at its arrival
    num_sealed: int = 0
    num_preemptions: int = 0
    num_given: int = 0  # output tokens given with the request
    num_prompt_reported: int = 0  # prompt logprobs sent to the client
    pooled: NDArray[np.float32] | None = None  # the sum over the pooled positions that are computed
    adopted: bool = False
    waiting_on_block: BlockHash | None = None  # another request computes this block
    onload: Onload | None = None  # blocks that must be loaded from the host before it can start

    @classmethod
    def of(cls, request: GenerateRequest, arrival_s: float) -> Request:
        """Makes a request. With output tokens, prompt logprobs count as already reported."""
        return cls(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            ticket=request.ticket,
            pull=request.pull,
            adapter=request.adapter,
            tells_progress=request.tells_progress,
            text_only=_text_only(request.sampling),
            arrival_s=arrival_s,
            since_s=arrival_s,
            output_ids=list(request.output_ids),
            num_given=len(request.output_ids),
            num_prompt_reported=len(request.prompt_ids) - 1 if request.output_ids else 0,
        )

    @property
    def block_ids(self) -> list[int]:
        return self.tables[0]

    @block_ids.setter
    def block_ids(self, block_ids: list[int]) -> None:
        self.tables[0] = block_ids

    def held(self) -> list[list[int]]:
        """For each group, the blocks that the request has references to."""
        return [table[passed:] for table, passed in zip(self.tables, self.num_passed, strict=True)]

    @property
    def num_held(self) -> int:
        return sum(map(len, self.tables)) - sum(self.num_passed)

    @property
    def prediction_ids(self) -> tuple[int, ...]:
        return self.sampling.speculation.prediction_ids

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_to_compute(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed

    @property
    def num_expected(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_due

    @property
    def num_to_plan(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_due - self.num_planned

    @property
    def owes_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and self.num_prompt_reported < self.num_prompt - 1

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        prompt = self.num_prompt
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return tuple(self.output_ids[start - prompt : stop - prompt])
        return self.prompt_ids[start:] + tuple(self.output_ids[: stop - prompt])

    def in_blocks(self, first: int, block_size: int) -> tuple[int, ...]:
        """Token ids of the full blocks from block `first` on, perhaps with more after them: the prompt itself, not a
        copy, if no block of the answer is full."""
        stop = self.num_tokens // block_size * block_size
        return self.prompt_ids if not first and stop <= self.num_prompt else self.tokens(first * block_size, stop)


@dataclass(slots=True, eq=False)
class Onload:
    """Pages to load from the host (`workers.scheduling.onloads`): `pages` has the group of each, and its index in the
    chain of `hashes`. They save `num_tokens` tokens. `held`: blocks of a request that has ended, or of an onload
    without one."""

    load_id: int
    request: Request | None
    slots: Sequence[int]
    block_ids: Sequence[int]
    pages: Sequence[tuple[int, int]]
    hashes: Sequence[BlockHash]
    num_tokens: int
    num_clears: int
    held: list[int] = field(default_factory=list)
    done: bool = False


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A step that is planned and not applied. `freed`: blocks of requests that have ended since."""

    requests: tuple[Request, ...]
    sampling: dict[Request, int]  # the row of each request that samples
    freed: list[list[int]] = field(default_factory=list)


def _text_only(sampling: SamplingParams) -> bool:
    asks = sampling.stop_token_ids or sampling.logprobs is not None or sampling.grammar
    return not asks and not is_penalised(sampling)
