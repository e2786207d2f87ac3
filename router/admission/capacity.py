"""The time and room that the fleet's load leaves for a new request. Pure functions over candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.values import WorkerRole
from router.latency.decayed import Decayed
from router.policies.costs import load_s
from router.policies.table import FEW, CandidateTable, Floats, LoadRow

HALF_LIFE_S = 3.0
_ATTACK = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a worker may have before it before new work waits at the gateway instead, where it can still be ordered.

    A reader is busy with prompts for more than `max_backlog_s` (at its measured speed), or with `max_waiting` requests
    that have not begun; a writer has as many that wait for a seat, or fewer free blocks than a request needs.
    """

    max_backlog_s: float
    max_waiting: int

    def reads(self, load: LoadRow | CandidateTable) -> Any:
        """A bool, or those of all workers of a table."""
        speed = load.prefill_tokens_per_s
        in_time = (speed == 0) | (load.queued_prefill_tokens <= self.max_backlog_s * speed)
        return (load.num_waiting < self.max_waiting) & (in_time | (load.num_waiting == 0))

    def writes(self, load: LoadRow | CandidateTable, num_blocks: int) -> Any:
        """A bool, or those of all workers of a table."""
        has_room = (load.num_free_blocks > num_blocks) & (load.num_waiting < self.max_waiting)
        return has_room | (load.num_requests == 0)

    def fits(self, candidates: CandidateTable, num_blocks: int) -> bool:
        """Is there a worker, or a pair of them, that would begin with a request of so many blocks soon? Where nobody
        writes at all the answer is yes: what to do then is for the dispatcher to say. A decode worker does not count as
        a reader while there are others: it has nothing to read, and reads little, if any, of what comes."""
        prefill_pool, decode_pool = candidates.prefill_pool, candidates.decode_pool
        if not len(decode_pool):
            return True
        if len(candidates) <= FEW:
            rooms = zip(decode_pool.workers.roles, decode_pool.load_rows(), strict=True)
            idle = [(role, row) for role, row in rooms if self.writes(row, num_blocks)]
            if any(self.reads(row) for role, row in idle if role is WorkerRole.COLOCATED or not len(prefill_pool)):
                return True
            return bool(idle) and any(map(self.reads, prefill_pool.load_rows()))
        alone = decode_pool.workers.colocated if len(prefill_pool) else np.ones(len(decode_pool), dtype=np.bool_)
        room = self.writes(decode_pool, num_blocks)
        if (idle := room & alone).any() and (idle & self.reads(decode_pool)).any():
            return True
        return bool(room.any() and len(prefill_pool) and self.reads(prefill_pool).any())


class Overrun:
    """How much later than predicted first tokens have come recently: other steps, full decode workers and bursts delay
    them. The estimate rises quickly and halves every `HALF_LIFE_S`, so that jobs are not refused for a delay that is
    over.

    A job with less work before it than the late jobs is assumed to be late by proportionally less. Otherwise a cluster
    that fell behind once would refuse every job even while it is idle.
    """

    def __init__(self) -> None:
        self._late_s = Decayed(half_life_s=HALF_LIFE_S)
        self._predicted_s = 0.0

    def observe(self, seconds: float, *, predicted_s: float, now: float) -> None:
        """Records that a first token came `seconds` later than predicted."""
        self._late_s.age(now)
        [known] = self._late_s.sums
        self._late_s.add(_ATTACK * max(0.0, seconds - known))
        if seconds > known:
            self._predicted_s += _ATTACK * (predicted_s - self._predicted_s)

    def of(self, predicted_s: float, *, now: float) -> float:
        """The expected delay of a first token that is predicted after `predicted_s`."""
        share = predicted_s / self._predicted_s if predicted_s < self._predicted_s else 1.0
        return self._late_s.at(now)[0] * share


def predicted_ttft_s(
    candidates: CandidateTable, num_tokens: int, num_ahead: int, *, overhead_s: float = 0.0
) -> float | None:
    """Seconds to the first token on the best reader, with `num_ahead` prompt tokens in line before it at the gateway.

    What is in line is shared out by all readers. `overhead_s` comes to every first token, besides the reading. None
    while no reader's speed is known.
    """
    pool = candidates.prompt_pool
    speed = reading_speed(pool)
    if not speed:
        return None
    measured = pool.take(np.flatnonzero(pool.prefill_tokens_per_s))
    return num_ahead / speed + float(_reading_s(measured, num_tokens, overhead_s).min())


def least_ttft_s(candidates: CandidateTable, num_tokens: int, *, overhead_s: float = 0.0) -> float | None:
    """Seconds to the first token on the best reader if nothing else were to be done; None where nobody reads. A reader
    that has not told its speed, for want of prompts that show it, may be the fastest: it may read at once."""
    pool = candidates.prompt_pool
    if not len(pool):
        return None
    measured = pool.take(np.flatnonzero(pool.prefill_tokens_per_s))
    least_s = float(_idle_s(measured, num_tokens, overhead_s).min(initial=math.inf))
    return least_s if len(measured) == len(pool) else min(least_s, overhead_s)


def nobody_here(candidates: CandidateTable) -> bool:
    """Has no worker any request?"""
    return not (candidates.num_requests.any() or candidates.queued_prefill_tokens.any())


def reading_speed(candidates: CandidateTable) -> float:
    """Tokens a second of all readers; 0 while none has been measured."""
    return float(sum(candidates.prompt_pool.prefill_tokens_per_s.tolist()))


def _reading_s(pool: CandidateTable, num_tokens: int, overhead_s: float) -> Floats:
    """As the worker measures its steps, or as first tokens have come of late, which also waited for each other's steps
    and for answers in between: whatever is longer. Of one with nothing to read the shorter: were it believed to be late
    for good, nobody would be sent there to find out."""
    queued = pool.queued_prefill_tokens
    before = queued + num_tokens - pool.num_cached_tokens
    busy_s = np.maximum(before / pool.prefill_tokens_per_s, pool.prefill_time(before)) + load_s(pool)
    return np.where(queued > 0, busy_s, _idle_s(pool, num_tokens, overhead_s))


def _idle_s(pool: CandidateTable, num_tokens: int, overhead_s: float) -> Floats:
    missing = num_tokens - pool.num_cached_tokens
    stepping_s = missing / pool.prefill_tokens_per_s + overhead_s
    expected_s = pool.prefill_time(missing)
    seconds: Floats = np.minimum(stepping_s, np.where(expected_s > 0, expected_s, stepping_s)) + load_s(pool)
    return seconds
