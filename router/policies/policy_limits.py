"""Limits that no policy may exceed, as wrappers around policies and ranks."""

from __future__ import annotations

from collections.abc import Collection

from router.policies.candidate_columns import CandidateTable
from router.policies.decision import Decision, Policy, RequestView
from router.policies.scores import PoolScores, Rank

MAX_DIFFERENCE = 32
MAX_RATIO = 1.1
FORBIDDING = 1e9  # per excess request: no other cost comes near it


def balanced(rank: Rank) -> Rank:
    """Follows `rank` while its pool is balanced, and otherwise prefers the shortest queue.

    A pool is unbalanced when its longest queue exceeds the shortest by over 32 requests and is over 1.1 times as long.
    These are the bounds of SGLang's cache-aware router.
    """

    def guarded(view: RequestView, candidates: CandidateTable) -> PoolScores:
        queues, ranked = candidates.num_requests, rank(view, candidates)
        longest, shortest = queues.max(), queues.min()
        if longest - shortest > MAX_DIFFERENCE and longest > MAX_RATIO * shortest:
            return ranked.plus(imbalance=(queues - shortest) * FORBIDDING)
        return ranked

    return guarded


def avoiding(policy: Policy, worker_ids: Collection[str]) -> Policy:
    """Avoids workers that have just failed the request, except where a pool has no other."""

    def decide(view: RequestView, candidates: CandidateTable) -> Decision:
        pools = (candidates.prefill_pool.besides(worker_ids), candidates.decode_pool.besides(worker_ids))
        places = candidates.workers.places
        return policy(view, candidates.take([places[one] for pool in pools for one in pool.workers.worker_ids]))

    return decide if worker_ids else policy
