"""A policy that considers caches alone. It is a baseline for comparisons and not meant for serving."""

from __future__ import annotations

from router.config import RouterConfig
from router.policies import basic
from router.policies.base import Policy, RequestView
from router.policies.costs import num_uncached
from router.policies.pair import ShortRemainder, pair
from router.policies.scores import PoolScores, pool_scores
from router.policies.table import CandidateTable

MATCH = 0.5  # share of the prompt, as in SGLang's cache-aware router (its cache_threshold)


def longest_prefix(config: RouterConfig) -> Policy:
    return pair("longest_prefix", prefill=_prefix, decode=_prefix, short=ShortRemainder.of(config))


def _prefix(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """Scores by the tokens to be computed, where a worker has at least `MATCH` of the prompt cached. A shorter match
    may be a beginning that all prompts share: the first worker with it would then compute every prompt. So the least
    loaded worker is chosen instead."""
    if candidates.num_cached_tokens.max() < MATCH * view.num_tokens:
        return basic.load(view, candidates)
    return pool_scores(candidates, uncached=num_uncached(view, candidates))
