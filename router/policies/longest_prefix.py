"""The policy that looks at caches alone: a baseline to compare others with, not one to serve with."""

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
    """Tokens to be computed, where a worker has at least `MATCH` of the prompt cached. A shorter match may be the
    beginning of all prompts: then the least loaded worker is chosen, or the first worker with that beginning would
    compute every prompt."""
    if candidates.num_cached_tokens.max() < MATCH * view.num_tokens:
        return basic.load(view, candidates)
    return pool_scores(candidates, uncached=num_uncached(view, candidates))
