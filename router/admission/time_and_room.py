"""The time and room that the fleet's load leaves for a new request. Pure functions over candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.values import WorkerRole
from router.routing.candidate_columns import FEW, CandidateTable, Floats, LoadRow
from router.routing.fits import Decayed
from router.routing.request_seconds import load_s

HALF_LIFE_S = 3.0
_ATTACK = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The work that a worker may have before new work waits at the gateway instead, where its order can still change.

    A prefill worker has no room with prompts for more than `max_backlog_s` (at its measured speed), or with
    `max_waiting` requests that have not begun. A decode worker has none with as many waiting requests, or with fewer
    free blocks than a request needs.
    """

    max_backlog_s: float
    max_waiting: int

    def can_prefill(self, load: LoadRow | CandidateTable) -> Any:
        speed = load.prefill_tokens_per_s
        in_time = (speed == 0) | (load.queued_prefill_tokens <= self.max_backlog_s * speed)
        return (load.num_waiting < self.max_waiting) & (in_time | (load.num_waiting == 0))

    def can_decode(self, load: LoadRow | CandidateTable, num_blocks: int) -> Any:
        has_room = (load.num_free_blocks > num_blocks) & (load.num_waiting < self.max_waiting)
        return has_room | (load.num_requests == 0)

    def fits(self, candidates: CandidateTable, num_blocks: int) -> bool:
        """Whether a worker, or a pair, would soon begin a request with this number of blocks. Without any decode worker
        the answer is True: the dispatcher handles that case. A decode worker does not count for prefill while there are
        prefill workers: it computes few prompts, if any."""
        prefill_pool, decode_pool = candidates.prefill_pool, candidates.decode_pool
        if not len(decode_pool):
            return True
        if len(candidates) <= FEW:
            rooms = zip(decode_pool.workers.roles, decode_pool.load_rows(), strict=True)
            free = [(role, row) for role, row in rooms if self.can_decode(row, num_blocks)]
            whole = (row for role, row in free if role is WorkerRole.COLOCATED or not len(prefill_pool))
            if any(map(self.can_prefill, whole)):
                return True
            return bool(free) and any(map(self.can_prefill, prefill_pool.load_rows()))
        alone = decode_pool.workers.colocated if len(prefill_pool) else np.ones(len(decode_pool), dtype=np.bool_)
        room = self.can_decode(decode_pool, num_blocks)
        if (idle := room & alone).any() and (idle & self.can_prefill(decode_pool)).any():
            return True
        return bool(room.any() and len(prefill_pool) and self.can_prefill(prefill_pool).any())


class Overrun:
    """How much later than predicted first tokens came recently, because of other steps, full decode workers and bursts.
    The estimate rises quickly and halves every `HALF_LIFE_S`, so that jobs are not refused for a delay that is over.

    A job with less work before it than the late jobs is assumed to be late by proportionally less. Otherwise a cluster
    that fell behind once would refuse every job even while it is idle."""

    def __init__(self) -> None:
        self._late_s = Decayed(half_life_s=HALF_LIFE_S)
        self._predicted_s = 0.0

    def observe(self, seconds: float, *, predicted_s: float, now: float) -> None:
        self._late_s.age(now)
        [late_s] = self._late_s.sums
        self._late_s.add(_ATTACK * max(0.0, seconds - late_s))
        if seconds > late_s:
            self._predicted_s += _ATTACK * (predicted_s - self._predicted_s)

    def of(self, predicted_s: float, *, now: float) -> float:
        share = predicted_s / self._predicted_s if predicted_s < self._predicted_s else 1.0
        return self._late_s.at(now)[0] * share


def predicted_ttft_s(
    candidates: CandidateTable, num_tokens: int, num_ahead: int, *, overhead_s: float = 0.0
) -> float | None:
    """Seconds to the first token on the best worker, with `num_ahead` prompt tokens before it; None while no speed is
    known. `overhead_s` is the time of each first token besides prefill."""
    pool = candidates.prompt_pool
    speed = prefill_speed(pool)
    if not speed:
        return None
    measured = pool.take(np.flatnonzero(pool.prefill_tokens_per_s))
    return num_ahead / speed + float(_prefill_s(measured, num_tokens, overhead_s).min())


def least_ttft_s(candidates: CandidateTable, num_tokens: int, *, overhead_s: float = 0.0) -> float | None:
    """Seconds to the first token on the best worker without any other request; None without a worker for prompts. A
    worker of unknown speed may be the fastest: its prefill is assumed to take no time."""
    pool = candidates.prompt_pool
    if not len(pool):
        return None
    measured = pool.take(np.flatnonzero(pool.prefill_tokens_per_s))
    least_s = float(_idle_s(measured, num_tokens, overhead_s).min(initial=math.inf))
    return least_s if len(measured) == len(pool) else min(least_s, overhead_s)


def is_idle(candidates: CandidateTable) -> bool:
    return not (candidates.num_requests.any() or candidates.queued_prefill_tokens.any())


def prefill_speed(candidates: CandidateTable) -> float:
    return float(sum(candidates.prompt_pool.prefill_tokens_per_s.tolist()))


def _prefill_s(pool: CandidateTable, num_tokens: int, overhead_s: float) -> Floats:
    """Seconds to the first token on each worker. Busy workers: the longer of the time by the worker's own measurements
    and the time by recent first tokens, which includes the wait for other steps and answers. Idle workers: the shorter
    of both. Otherwise a worker that was once slow would get no request, and would never be measured again."""
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
