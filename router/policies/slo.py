"""The default: the pair whose first token comes soonest and whose tokens follow fastest, without making others late.

Every cost is in seconds. Prefill: `overhead`, `queue`, `load` (of what is in host memory) and `compute` add up to the
predicted time to the first token.
`displaced` is what computing costs others. A second of it evicts blocks that others would find. Once every worker
has a queue, it also delays the requests behind the prompt, about as many as the worker has:
`compute x (DISPLACED + requests x shortest queue / mean queue)` (the externality of a job in a queue: Haviv and Ritov,
"Externalities, tangible externalities, and queue disciplines", Management Science 44, 1998).
While some prefill worker has no queue, the next prompt goes there and is not delayed.
`imbalance` keeps the work of prefill workers near its mean.
Decode: `decode` is what the answer takes, and what it adds to the answers beside it; `shortage` the wait for blocks.
Beyond an objective a second counts `LATE` times more (`late_ttft`, `late_tpot`), beyond the request's own limit
`OVERDUE` times, unless every worker would be late: then the request goes where it costs least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from router.config import RouterConfig
from router.policies.base import Policy, RequestView
from router.policies.costs import load_s, num_off_device, num_uncached, tpot_s, transfer_s, ttft_s
from router.policies.pair import ShortRemainder, pair
from router.policies.scores import PoolScores, Rank, pool_scores
from router.policies.table import CandidateTable, Floats

# Tried on Mooncake's synthetic trace (benchmarks/routing/trace.py): hits and time to the first token, 4 and 16 workers.
DISPLACED = 3.0  # seconds that others lose by a second of computing on an idle worker: by what it evicts
GUARD = 0.2  # share of work above its pool's mean from which a worker's cache attracts no more requests
SETTLING = 4.0  # requests of this size, added to the mean: the first requests are no imbalance
LATE = 4.0
OVERDUE = 1000.0  # a request that was admitted with a limit is answered within it
TOLERANCE = 0.05  # costs are predictions: smaller differences do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Seconds to the first token, and between tokens, that a request should not exceed."""

    ttft_s: float
    tpot_s: float


def slo(config: RouterConfig) -> Policy:
    objectives = Objectives(ttft_s=config.ttft_ms / 1000, tpot_s=config.tpot_ms / 1000)
    return pair(
        "slo",
        prefill=prefill_rank(objectives),
        decode=decode_rank(objectives),
        short=ShortRemainder.of(config),
        transfer=transfer_s,
        tolerance=TOLERANCE,
    )


def prefill_rank(objectives: Objectives) -> Rank:
    """Orders by the time to the first token, plus its cost for other requests."""

    def rank(view: RequestView, candidates: CandidateTable) -> PoolScores:
        line, load = candidates.prefill_time, load_s(candidates)
        compute = line.each_s * num_uncached(view, candidates)
        above = _excess(view, candidates) / GUARD
        first_s = ttft_s(view, candidates, load)
        late = _late(first_s, objectives.ttft_s) * LATE
        if view.within_s < math.inf:
            late = late + _late(first_s, view.within_s) * OVERDUE
        return pool_scores(
            candidates,
            overhead=line.fixed_s,
            queue=line.each_s * candidates.queued_prefill_tokens,
            load=load,
            compute=compute,
            displaced=compute * (DISPLACED + _congestion(candidates) * candidates.num_requests),
            imbalance=line.each_s * view.num_tokens * (1 + DISPLACED) * (above * above),
            late_ttft=late,
        )

    return rank


def decode_rank(objectives: Objectives) -> Rank:
    """Orders by the time of the answer, its cost for the answers beside it, and the wait for blocks."""

    def rank(view: RequestView, candidates: CandidateTable) -> PoolScores:
        step_s = tpot_s(candidates)
        answer = view.answer_tokens * step_s
        others = view.answer_tokens * candidates.step_time.each_s * candidates.num_requests
        return pool_scores(
            candidates,
            decode=answer + others,
            shortage=_shortage(view, candidates) * answer,
            late_tpot=_late(step_s, objectives.tpot_s) * view.answer_tokens * LATE,
        )

    return rank


def _congestion(candidates: CandidateTable) -> float:
    """0 while some worker has no queue, 1 when all queues are equally long: the shortest queue over the mean."""
    queues = candidates.queued_prefill_tokens
    total = _sum(queues)
    return float(queues.min()) * len(queues) / total if total else 0.0


def _late(seconds: Floats, objective_s: float) -> Floats:
    """Seconds beyond the objective; none of them count where no worker keeps it."""
    kept = seconds.min() <= objective_s
    return np.maximum(0.0, seconds - objective_s) if kept else np.zeros(len(seconds))


def _excess(view: RequestView, candidates: CandidateTable) -> Floats:
    """The share by which each worker's recent work, for its predicted speed, is above its pool's mean; 0 below it."""
    each_s = candidates.prefill_time.each_s
    mean_s = _sum(each_s) / len(each_s)
    work = candidates.recent_tokens * each_s / mean_s if mean_s else candidates.recent_tokens
    mean = _sum(work) / len(work)
    settled = mean + SETTLING * view.num_tokens
    excess: Floats = np.maximum(0.0, work - mean) / settled
    return excess


def _sum(values: Floats) -> float:
    """Adds in order: numpy's own sum differs between processors."""
    return float(np.cumsum(values)[-1])


def _shortage(view: RequestView, candidates: CandidateTable) -> Floats:
    """How much of the present answers must end before there are blocks for this one: 0 with room, 1 for all."""
    needed = num_off_device(view, candidates) / view.block_size + 1
    used = candidates.num_blocks - candidates.num_free_blocks
    missing = np.maximum(0.0, needed - candidates.num_free_blocks)
    shortage: Floats = np.minimum(missing / np.maximum(used, 1.0), 1.0)
    return shortage
