"""Limits as wrappers: what no policy may do, whatever it would like to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from router.policies.base import Candidate, Decision, Policy, Rank, RequestView, Score
from router.policies.pair import decodes

MAX_DIFFERENCE = 32
MAX_RATIO = 1.1
FORBIDDING = 1e9  # per request in excess: no other cost comes near it


def balanced(rank: Rank) -> Rank:
    """Follows `rank` while its pool is balanced, else the shortest queue, until the pool is balanced again.

    Out of balance: the longest queue has over 32 requests more than the shortest and is over 1.1 times as long, the
    bounds of SGLang's cache-aware router.
    """

    def guarded(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
        queues = [candidate.num_requests for candidate in candidates]
        longest, shortest = max(queues), min(queues)
        if longest - shortest > MAX_DIFFERENCE and longest > MAX_RATIO * shortest:
            ahead = {candidate.worker_id: candidate.num_requests - shortest for candidate in candidates}
            return [_with(scored, imbalance=ahead[scored.worker_id] * FORBIDDING) for scored in rank(view, candidates)]
        return rank(view, candidates)

    return guarded


def avoiding(policy: Policy, worker_ids: Collection[str]) -> Policy:
    """Keeps away from workers that have just failed the request, except where a pool has no other."""

    def decide(view: RequestView, candidates: Sequence[Candidate]) -> Decision:
        readers = [candidate for candidate in candidates if not decodes(candidate)]
        writers = [candidate for candidate in candidates if decodes(candidate)]
        return policy(view, [*_others(readers, worker_ids), *_others(writers, worker_ids)])

    return decide if worker_ids else policy


def _with(scored: Score, **terms: float) -> Score:
    return replace(scored, total=scored.total + sum(terms.values()), terms=(*scored.terms, *terms.items()))


def _others(pool: list[Candidate], worker_ids: Collection[str]) -> list[Candidate]:
    return [candidate for candidate in pool if candidate.worker_id not in worker_ids] or pool
