"""The rank that looks at caches alone: what others are measured against, and no policy to serve with."""

from __future__ import annotations

from router.policies.base import RequestView
from router.policies.candidates import Candidates, Scores, scores
from router.policies.costs import num_uncached


def longest_prefix(view: RequestView, candidates: Candidates) -> Scores:
    """Tokens to be computed; nothing else. Whoever has read much is sent more of it."""
    return scores(candidates, uncached=num_uncached(view, candidates))
