"""Policies to compare with, not meant for serving: the less loaded of two, and caches alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from router.router_config import RouterConfig
from router.routing.basic import load
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, Policy, RequestView
from router.routing.pair import ShortRemainder, pair
from router.routing.request_seconds import num_uncached
from router.routing.scores import PoolScores, pool_scores

MATCH = 0.5  # share of the prompt, as in SGLang's cache-aware router (its cache_threshold)


def longest_prefix(config: RouterConfig) -> Policy:
    return pair("longest_prefix", prefill=_prefix, decode=_prefix, short=ShortRemainder.of(config))


def _prefix(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """Scores by the tokens to be computed, where a worker has at least `MATCH` of the prompt cached. A shorter match
    may be a beginning that all prompts share: the first worker with it would then compute every prompt. So the least
    loaded worker is chosen instead."""
    if candidates.num_cached_tokens.max() < MATCH * view.num_tokens:
        return load(view, candidates)
    return pool_scores(candidates, uncached=num_uncached(view, candidates))


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


BASELINES: Mapping[str, Callable[[RouterConfig], Policy]] = {
    "power_of_two": power_of_two,
    "longest_prefix": longest_prefix,
}
