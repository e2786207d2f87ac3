"""Limits as wrappers: what no policy may do, whatever it would like to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.policies.base import Candidate, Decision, Policy, RequestView
from router.policies.table import Candidates, Rank, Scores

MAX_DIFFERENCE = 32
MAX_RATIO = 1.1
FORBIDDING = 1e9  # per request in excess: no other cost comes near it


def balanced(rank: Rank) -> Rank:
    """Follows `rank` while its pool is balanced, else the shortest queue, until the pool is balanced again.

    Out of balance: the longest queue has over 32 requests more than the shortest and is over 1.1 times as long, the
    bounds of SGLang's cache-aware router.
    """

    def guarded(view: RequestView, candidates: Candidates) -> Scores:
        queues, ranked = candidates.num_requests, rank(view, candidates)
        longest, shortest = queues.max(), queues.min()
        if longest - shortest > MAX_DIFFERENCE and longest > MAX_RATIO * shortest:
            return ranked.plus(imbalance=(queues[ranked.places] - shortest) * FORBIDDING)
        return ranked

    return guarded


def avoiding(policy: Policy, worker_ids: Collection[str]) -> Policy:
    """Keeps away from workers that have just failed the request, except where a pool has no other."""

    def decide(view: RequestView, candidates: Sequence[Candidate]) -> Decision:
        offered = Candidates.of(candidates)
        pools = (offered.readers.besides(worker_ids), offered.writers.besides(worker_ids))
        kept = [offered.crew.places[worker_id] for pool in pools for worker_id in pool.crew.worker_ids]
        return policy(view, offered.take(kept))

    return decide if worker_ids else policy
