"""Round-robin time slices for sequences when more have begun than a batch has slots (`max_num_seqs`).

    a request has waited for a slot for a time slice ─▶ the sequence that has run longest, for at least a time slice,
                                                        is paused: it keeps its KV and queues behind that request

Without time slices a request of two tokens would wait until the longest answers before it have ended. A sequence whose
client reads nothing ranks behind all others and makes room at once: `Scheduler` takes its blocks, too, where others
lack some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from workers.kv.block_pool import BlockPool
from workers.scheduling.request import Request, State
from workers.worker_config import SchedulerConfig

QueueRank = tuple[float, int]


def sequences_to_pause(
    running: Sequence[Request],
    waiting: Iterable[Request],
    pool: BlockPool,
    config: SchedulerConfig,
    now: float,
    *,
    is_blocked: bool,
) -> list[Request]:
    """Running sequences to pause now; only decoding ones are paused.

    First those whose clients read nothing, last in rank first: one for each request that waits for a slot, or for the
    first of those that lack blocks (`is_blocked`). Without any, the longest running ones, one for each overdue request
    of at least their priority; none while blocks are short: a paused sequence keeps its blocks, so others would be
    preempted."""
    awaiting = [request for request in waiting if request.awaits_slot]
    num_wanted = max(sum(not request.is_unread for request in awaiting), int(is_blocked))
    unread = [request for request in reversed(running) if request.is_unread and request.num_to_plan == 1]
    if num_wanted and unread:
        return unread[:num_wanted]
    overdue = [request for request in awaiting if now - request.since_s >= config.time_slice_s]
    if not overdue or pool.num_free < len(running) * pool.windows.num_groups:
        return []
    running_longest = [
        request for request in running if request.num_to_plan == 1 and now - request.since_s >= config.time_slice_s
    ]
    running_longest.sort(key=lambda request: request.since_s)
    chosen: list[Request] = []
    for request in overdue:
        at = next(
            (at for at, each in enumerate(running_longest) if rank_behind(each, config, now) > request.rank), None
        )
        if at is None:
            break
        chosen.append(running_longest.pop(at))
    return chosen


def enter_batch(request: Request, now: float) -> None:
    request.state, request.since_s, request.awaits_slot = State.RUNNING, now, False


def leave_batch(request: Request, config: SchedulerConfig, now: float) -> None:
    """Pauses the request after all others; it keeps its blocks."""
    request.rank = rank_behind(request, config, now)
    request.state, request.adopted = State.WAITING, True
    request.since_s, request.awaits_slot = now, True


def rank_behind(request: Request, config: SchedulerConfig, now: float) -> QueueRank:
    """The request's rank if it arrived now; after all others while its client reads nothing."""
    if request.is_unread:
        return inf, request.rank[1]
    return now - request.priority * config.priority_head_start_s, request.rank[1]
