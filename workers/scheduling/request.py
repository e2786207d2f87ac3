"""One sequence on its way through an engine: the only mutable noun the scheduler knows.

Positions of its tokens, and who has computed them::

    0 ........ num_cached ........ num_computed ........ num_planned ........ num_tokens ........ num_expected
    |  prefix cache  |  by this engine  |  by steps in flight  |  still to plan  |  being sampled in flight  |
    |<----------------------- prompt_ids ----------------------->|<- output_ids ->|

Steps in flight are planned and not applied. With none, num_planned == num_computed and num_expected == num_tokens;
with some, num_planned may lie beyond num_tokens: a token that is being sampled can be computed already.

`block_ids[i]` holds positions [i * block_size, (i + 1) * block_size). Every id in it is one reference of the block
pool, taken when the block was matched, allocated or adopted, and given back once, by the scheduler, when the request
leaves or is preempted; the blocks of a step in flight stay taken until it is over. A sequence is in decode when
exactly one token (the last) is still to plan. A preempted one starts again at 0, and finds in the cache what is left
of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from protos.values import BlockHash, GenerateRequest, SamplingParams, Ticket
from workers.batch import is_penalised

if TYPE_CHECKING:
    from workers.scheduling.host_loads import Load


class State(Enum):
    WAITING = auto()  # not admitted yet, preempted, or has given up its seat for a while
    RUNNING = auto()  # has blocks, is in the batch
    HELD = auto()  # finished computing; its blocks are still being read by a transfer
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """`hashes` are the chained hashes of the full blocks of prompt + output known so far; `num_sealed` of them are
    registered in the pool as cached prefix. `adopted` says that the blocks came with a reservation, or were kept when
    the sequence gave up its seat. It waits, or runs, `since_s`; `lacks_seat` while it waits for others to finish.

    `rank` orders requests: the smallest goes first, the largest is preempted first. `num_given` output tokens came
    with the request. `num_cached` is what its first admission found (a recomputation is not the client's gain).
    `num_prompt_reported` prompt logprobs are with the client. `num_due` tokens are being sampled by steps in flight.
    `waiting_on_block` is a block that another request computes. `num_spared` tokens were cached or being computed when
    it came. `load` are blocks that come from the host before it can start. `text_only`: nothing is asked for that makes
    steps differ, no stop ids, logprobs, penalties or grammar.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    priority: int = 0
    ticket: Ticket | None = None
    pull: Ticket | None = None
    tells_progress: bool = False
    text_only: bool = False
    arrival_s: float = 0.0
    since_s: float = 0.0
    lacks_seat: bool = False
    rank: tuple[float, int] = (0.0, 0)
    output_ids: list[int] = field(default_factory=list)
    state: State = State.WAITING
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_due: int = 0
    num_cached: int = 0
    num_spared: int = 0
    num_sealed: int = 0
    num_preemptions: int = 0
    num_given: int = 0
    num_prompt_reported: int = 0
    adopted: bool = False
    waiting_on_block: BlockHash | None = None
    load: Load | None = None

    @classmethod
    def of(cls, request: GenerateRequest, arrival_s: float) -> Request:
        """Tokens that are known already were delivered with their prompt logprobs."""
        return cls(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            ticket=request.ticket,
            pull=request.pull,
            tells_progress=request.tells_progress,
            text_only=_text_only(request.sampling),
            arrival_s=arrival_s,
            since_s=arrival_s,
            output_ids=list(request.output_ids),
            num_given=len(request.output_ids),
            num_prompt_reported=len(request.prompt_ids) - 1 if request.output_ids else 0,
        )

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
        """Token ids of positions [start, stop)."""
        prompt = self.num_prompt
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return tuple(self.output_ids[start - prompt : stop - prompt])
        return self.prompt_ids[start:] + tuple(self.output_ids[: stop - prompt])

    def in_blocks(self, first: int, block_size: int) -> tuple[int, ...]:
        """Token ids of the full blocks from the `first` on, perhaps with a rest after them: the prompt itself, not a
        copy, if no block of the answer is full yet."""
        stop = self.num_tokens // block_size * block_size
        return self.prompt_ids if not first and stop <= self.num_prompt else self.tokens(first * block_size, stop)


def _text_only(sampling: SamplingParams) -> bool:
    asks = sampling.stop_token_ids or sampling.logprobs is not None or sampling.grammar
    return not asks and not is_penalised(sampling)
