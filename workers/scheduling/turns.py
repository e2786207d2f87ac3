"""Who gives up a seat when more sequences have begun than may run at a time: they take turns, and none waits for ever.

    waits for a seat for a time slice ─▶ the sequence seated longest, for one at least, waits behind it, with its KV

Without turns a request of two tokens would wait for as long as the longest answers before it take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.config import SchedulerConfig
from workers.kv.blocks import BlockPool
from workers.scheduling.request import Request, State

QueueRank = tuple[float, int]


def yielding(
    running: Sequence[Request], waiting: Iterable[Request], pool: BlockPool, config: SchedulerConfig, now: float
) -> list[Request]:
    """Running sequences that give up their seats now, longest seated first: one for each overdue request. Only a
    sequence that decodes does so, and only to one of no less priority. None does while blocks are short: it would keep
    its own, and others would be preempted for lack of them."""
    if pool.num_free < len(running):
        return []
    overdue = [request for request in waiting if request.lacks_seat and now - request.since_s >= config.time_slice_s]
    if not overdue:
        return []
    seated = [
        request for request in running if request.num_to_plan == 1 and now - request.since_s >= config.time_slice_s
    ]
    seated.sort(key=lambda request: request.since_s)
    found: list[Request] = []
    for request in overdue:
        at = next((at for at, one in enumerate(seated) if _rank_behind(one, config, now) > request.rank), None)
        if at is None:
            break
        found.append(seated.pop(at))
    return found


def take_seat(request: Request, now: float) -> None:
    request.state, request.since_s, request.lacks_seat = State.RUNNING, now, False


def give_up_seat(request: Request, config: SchedulerConfig, now: float) -> None:
    """The request waits behind all others, and keeps its blocks."""
    request.rank = _rank_behind(request, config, now)
    request.state, request.adopted = State.WAITING, True
    request.since_s, request.lacks_seat = now, True


def _rank_behind(request: Request, config: SchedulerConfig, now: float) -> QueueRank:
    """Its rank if it came now."""
    return now - request.priority * config.priority_head_start_s, request.rank[1]
