"""The default: the pair whose first token comes soonest and whose tokens follow fastest, without making others late.

Every cost is in seconds. Reading: `overhead`, `queue`, `load` (of what is in host memory) and `compute` add up to the
predicted time to the first token.
`displaced` is what computing costs others: those queued behind it, and those whose cached blocks its own blocks evict.
`imbalance` keeps the work that readers are sent near their mean.
Writing: `decode` is what the answer takes, and what it adds to the answers beside it; `shortage` the wait for blocks.
Beyond an objective a second counts `LATE` times more (`late_ttft`, `late_tpot`), as long as somebody can keep it: what
is late everywhere goes where it costs least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.base import Candidate, Rank, RequestView, Score, score
from router.policies.costs import load_s, num_off_device, num_uncached, tpot_s, ttft_s

# Tried on Mooncake's synthetic trace (benchmarks/routing_trace.py): hits and time to the first token, 4 and 16 workers.
DISPLACED = 5.0  # seconds that others lose by a second of computing
GUARD = 0.2  # by this share above its pool's mean, a worker's cache attracts nothing any more
SETTLING = 4.0  # requests of this size
LATE = 4.0
TOLERANCE = 0.05  # costs are predictions: what differs less is equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Seconds to the first token, and between tokens, that a request should not exceed."""

    ttft_s: float
    tpot_s: float


def reading(objectives: Objectives) -> Rank:
    """Ranks readers by the time to the first token, and what it costs others."""

    def rank(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
        excess = _excess(view, candidates)
        soonest = min(ttft_s(view, candidate) for candidate in candidates)
        scores = []
        for candidate, above in zip(candidates, excess, strict=True):
            line = candidate.reading
            compute = line.each_s * num_uncached(view, candidate)
            late = ttft_s(view, candidate) - objectives.ttft_s if soonest <= objectives.ttft_s else 0.0
            scores.append(
                score(
                    candidate,
                    overhead=line.fixed_s,
                    queue=line.each_s * candidate.queued_prefill_tokens,
                    load=load_s(candidate),
                    compute=compute,
                    displaced=compute * DISPLACED,
                    imbalance=line.each_s * view.num_tokens * (1 + DISPLACED) * (above / GUARD) ** 2,
                    late_ttft=max(0.0, late) * LATE,
                )
            )
        return scores

    return rank


def writing(objectives: Objectives) -> Rank:
    """Ranks writers by the time of the answer, its cost to those beside it, and the wait for blocks."""

    def rank(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
        quickest = min(tpot_s(candidate) for candidate in candidates)
        scores = []
        for candidate in candidates:
            step = tpot_s(candidate)
            late = step - objectives.tpot_s if quickest <= objectives.tpot_s else 0.0
            answer = view.answer_tokens * step
            others = view.answer_tokens * candidate.stepping.each_s * candidate.num_requests
            scores.append(
                score(
                    candidate,
                    decode=answer + others,
                    shortage=_shortage(view, candidate) * answer,
                    late_tpot=max(0.0, late) * view.answer_tokens * LATE,
                )
            )
        return scores

    return rank


def _excess(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[float]:
    """By which share each one's recent work, for its measured speed, is above its pool's mean; 0 for those below."""
    fastest = max(candidate.prefill_tokens_per_s for candidate in candidates) or 1.0
    slowness = [fastest / (candidate.prefill_tokens_per_s or fastest) for candidate in candidates]
    work = [candidate.recent_tokens * slow for candidate, slow in zip(candidates, slowness, strict=True)]
    mean = sum(work) / len(work)
    settled = mean + SETTLING * view.num_tokens  # the first requests are no imbalance
    return [max(0.0, one - mean) / settled for one in work]


def _shortage(view: RequestView, candidate: Candidate) -> float:
    """How much of the present answers must end before there are blocks for this one: 0 with room, 1 for all."""
    needed = num_off_device(view, candidate) / view.block_size + 1
    used = candidate.num_blocks - candidate.num_free_blocks
    missing = needed - candidate.num_free_blocks
    return min(missing / max(used, 1), 1.0) if missing > 0 else 0.0
