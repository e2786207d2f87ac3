"""The rank that looks at caches alone: what others are measured against, and no policy to serve with."""

from __future__ import annotations

from router.policies.base import RequestView
from router.policies.basic import least_loaded
from router.policies.costs import num_uncached
from router.policies.table import Candidates, Scores, scores

MATCH = 0.5  # of the prompt, as in SGLang's cache-aware router (its cache_threshold)


def longest_prefix(view: RequestView, candidates: Candidates) -> Scores:
    """Tokens to be computed, where a worker has at least `MATCH` of the prompt cached: the worker that has read much is
    sent more of it. A shorter match may be what all prompts begin with: then the least loaded worker reads it, or the
    first worker that had the beginning would read everything."""
    if candidates.num_cached_tokens.max() < MATCH * view.num_tokens:
        return least_loaded(view, candidates)
    return scores(candidates, uncached=num_uncached(view, candidates))
