"""Policies that ignore caches: round robin, least loaded, the less loaded of two."""

from __future__ import annotations

import random

import numpy as np

from router.config import RouterConfig
from router.policies.base import Decision, Policy, RequestView
from router.policies.pair import ShortRemainder, pair
from router.policies.scores import PoolScores, pool_scores
from router.policies.table import CandidateTable


def round_robin(config: RouterConfig) -> Policy:
    return pair("round_robin", prefill=_turns, decode=_turns, short=ShortRemainder.of(config))


def least_loaded(config: RouterConfig) -> Policy:
    return pair("least_loaded", prefill=load, decode=load, short=ShortRemainder.of(config))


def power_of_two(config: RouterConfig) -> Policy:
    """Draws two workers of each pool by the request's id and takes the less loaded one.

    Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
    """
    policy = pair("power_of_two", prefill=load, decode=load, short=ShortRemainder.of(config))

    def decide(view: RequestView, candidates: CandidateTable) -> Decision:
        drawn: list[int] = []
        for pool in (candidates.prefill_pool, candidates.decode_pool):
            ids = random.Random(view.request_id).sample(pool.workers.worker_ids, k=min(2, len(pool)))
            drawn += (candidates.workers.places[worker_id] for worker_id in ids)
        return policy(view, candidates.take(drawn))

    return decide


def _turns(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """The term `turn` is the number of decisions until the worker's turn."""
    count = len(candidates)
    places = np.arange(count, dtype=np.float64)
    return pool_scores(candidates, turn=(places - view.num_decided % count) % count)


def load(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """Scores by the number of requests. A thousand queued prompt blocks count as one more request."""
    queue = candidates.queued_prefill_tokens / view.block_size / 1000
    return pool_scores(candidates, requests=candidates.num_requests, queue=queue)
