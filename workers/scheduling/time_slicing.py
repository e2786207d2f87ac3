"""Round-robin time slices for sequences when more have begun than a batch has slots (`max_num_seqs`).

    a request has waited for a slot for a time slice ─▶ the sequence that has run longest, for at least a time slice,
                                                        is paused: it keeps its KV and queues behind that request

Without time slices a request of two tokens would wait until the longest answers before it have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.config import SchedulerConfig
from workers.kv.blocks import BlockPool
from workers.scheduling.request import Request, State

QueueRank = tuple[float, int]


def sequences_to_pause(
    running: Sequence[Request], waiting: Iterable[Request], pool: BlockPool, config: SchedulerConfig, now: float
) -> list[Request]:
    """Running sequences to pause now, longest running first: one for each overdue request. Only decoding sequences are
    paused, and only for requests of at least their priority. None is paused while blocks are short: a paused sequence
    keeps its blocks, so others would be preempted."""
    if pool.num_free < len(running) * pool.windows.num_groups:
        return []
    overdue = [request for request in waiting if request.awaits_slot and now - request.since_s >= config.time_slice_s]
    if not overdue:
        return []
    running_longest = [
        request for request in running if request.num_to_plan == 1 and now - request.since_s >= config.time_slice_s
    ]
    running_longest.sort(key=lambda request: request.since_s)
    found: list[Request] = []
    for request in overdue:
        at = next((at for at, one in enumerate(running_longest) if _rank_behind(one, config, now) > request.rank), None)
        if at is None:
            break
        found.append(running_longest.pop(at))
    return found


def enter_batch(request: Request, now: float) -> None:
    request.state, request.since_s, request.awaits_slot = State.RUNNING, now, False


def leave_batch(request: Request, config: SchedulerConfig, now: float) -> None:
    """Pauses the request: it waits behind all others and keeps its blocks."""
    request.rank = _rank_behind(request, config, now)
    request.state, request.adopted = State.WAITING, True
    request.since_s, request.awaits_slot = now, True


def _rank_behind(request: Request, config: SchedulerConfig, now: float) -> QueueRank:
    """The request's rank if it arrived now."""
    return now - request.priority * config.priority_head_start_s, request.rank[1]
