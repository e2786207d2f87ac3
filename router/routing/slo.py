"""The default policy: it chooses the pair with the earliest first token and the fastest tokens after it, and avoids
making other requests late. Every cost is in seconds.

Prefill:
- `overhead`, `queue`, `load` (from host memory) and `compute` add up to the predicted time to the first token.
- `displaced` is the cost of computing to other requests. A second of computing evicts blocks that others would have
  found. Once every worker has a queue, it also delays the requests behind the prompt, about as many as the worker has:
  `compute x (DISPLACED + requests x shortest queue / mean queue)`. This is the externality of a job in a queue (Haviv
  and Ritov, "Externalities, tangible externalities, and queue disciplines", Management Science 44, 1998).
  While a prefill worker has no queue, it takes the next prompt, and no prompt is delayed.
- `imbalance` keeps the work of prefill workers near its mean.

A second beyond an objective counts `LATE` times more (`late_ttft`, `late_tpot`), and a second beyond the request's own
limit `OVERDUE` times more. If every worker would be late, the request goes to the worker where it costs least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable, Floats
from router.routing.decision import Policy, RequestView
from router.routing.pair import ShortRemainder, pair
from router.routing.request_seconds import load_s, num_off_device, num_uncached, tpot_s, transfer_s, ttft_s
from router.routing.scores import PoolScores, Rank, pool_scores

# Tried on Mooncake's synthetic trace (benchmarks/routing/trace.py): hits and time to the first token, 4 and 16 workers.
DISPLACED = 3.0  # seconds that other requests lose, through evicted blocks, for a second of computing on an idle worker
GUARD = 0.2  # share of work above its pool's mean at which a worker's cache attracts no more requests
SETTLING = 4.0  # requests of this size, added to the mean, so that the first requests are no imbalance
LATE = 4.0
OVERDUE = 1000.0  # an admitted request is answered within its limit
TOLERANCE = 0.05  # costs are predictions: smaller differences are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
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
        unit="s",
    )


def prefill_rank(objectives: Objectives) -> Rank:
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
    """The shortest queue over the mean queue: 0 while a worker has no queue, 1 when all queues are equally long."""
    queues = candidates.queued_prefill_tokens
    total = _sum(queues)
    return float(queues.min()) * len(queues) / total if total else 0.0


def _late(seconds: Floats, objective_s: float) -> Floats:
    """Seconds beyond the objective; 0 for all where every worker exceeds it."""
    is_met = seconds.min() <= objective_s
    return np.maximum(0.0, seconds - objective_s) if is_met else np.zeros(len(seconds))


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
    """Adds in order: numpy's sum depends on the processor."""
    return float(np.cumsum(values)[-1])


def _shortage(view: RequestView, candidates: CandidateTable) -> Floats:
    """The share of the running answers that must end before this answer has its blocks: 0 with room, 1 for all
    answers."""
    needed = num_off_device(view, candidates) / view.block_size + 1
    used = candidates.num_blocks - candidates.num_free_blocks
    missing = np.maximum(0.0, needed - candidates.num_free_blocks)
    shortage: Floats = np.minimum(missing / np.maximum(used, 1.0), 1.0)
    return shortage
