"""Plain steps: every running sequence decodes one token, and nothing else happens. Many can be taken at once.

No answer ends or could end, nobody waits and nobody new has come, and no block is taken or becomes full but by the last
of them: so of all that a worker tells, before the last only tokens and the number of the step change. Pure, as the
scheduler is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from protos.value import Value
from protos.values import SequenceUpdate
from workers.batch import Batch
from workers.kv.blocks import BlockPool
from workers.scheduling.request import Request, State

if TYPE_CHECKING:
    from workers.scheduling.scheduler import Scheduler


class Limits(Value, frozen=True, kw_only=True):
    """Of the scheduler. `can_stop`: some tokens end an answer that does not ignore them. `can_take`: there is a block
    for every sequence, and nothing but taking it has to be done for it."""

    block_size: int
    max_len: int
    can_stop: bool
    can_take: bool

    @classmethod
    def of(cls, scheduler: Scheduler) -> Limits:
        return cls(
            block_size=scheduler.pool.block_size,
            max_len=scheduler.max_len,
            can_stop=bool(scheduler.config.eos_ids),
            can_take=scheduler.pool.can_spare(scheduler.num_running),
        )


def num_alike(running: Sequence[Request], last: Batch, limits: Limits, num_in_flight: int) -> int:
    """How many steps from here on are plain, the one that takes or fills a block included, with so many launched
    already. They go on with the `last` batch: it must have sampled for these, and for nobody else."""
    if len(last.rows) != len(running):
        return 0
    least = limits.max_len
    for request, row in zip(running, last.rows, strict=True):
        if row.sample is None or row.request_id != request.request_id:
            return 0
        least = min(least, _num_plain(request, limits, num_in_flight))
        if least <= 0:
            return 0
    return least


def _num_plain(request: Request, limits: Limits, num_in_flight: int) -> int:
    num_output, sampling, size = len(request.output_ids), request.sampling, limits.block_size
    num_tokens, num_due, num_computed = len(request.prompt_ids) + num_output, request.num_due, request.num_computed
    num_planned = request.num_planned
    decodes = num_tokens + num_due - num_planned == 1 and num_due == num_in_flight and num_output > request.num_given
    if not decodes or num_planned - num_computed != num_in_flight:  # the latter: a rest after a preemption
        return 0
    may_stop = limits.can_stop and not sampling.ignore_eos
    if may_stop or num_output < sampling.min_tokens or not request.decodes_plainly:
        return 0
    ahead = max(num_in_flight, 1)
    return min(
        sampling.max_tokens - num_output - ahead,
        limits.max_len - num_tokens - ahead,
        len(request.block_ids) * size + 1 - num_tokens - num_due + limits.can_take,
        (request.num_sealed + 1) * size - 1 - num_computed + limits.can_take,
    )


def take(running: Sequence[Request], pool: BlockPool, num_steps: int) -> dict[str, int]:
    """The blocks that the last of so many plain steps begins, by request; they are the requests' from now on."""
    taken: dict[str, int] = {}
    size = pool.block_size
    for request in running:
        if request.num_expected + num_steps - 1 > len(request.block_ids) * size:
            fresh = pool.allocate(1)
            assert fresh is not None, "plain steps take no more blocks than there are"
            request.block_ids += fresh
            taken[request.request_id] = fresh[0]
    return taken


def extended(request: Request, token_ids: tuple[int, ...]) -> SequenceUpdate:
    """Plain steps have brought these."""
    assert request.state is State.RUNNING
    request.output_ids += token_ids
    request.num_computed += len(token_ids)
    request.num_planned += len(token_ids)
    return SequenceUpdate(request_id=request.request_id, token_ids=token_ids)
