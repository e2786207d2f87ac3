"""The rank that looks at caches alone: what others are measured against, and no policy to serve with."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, RequestView, Score, score


def longest_prefix(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """Tokens to be computed; nothing else. Whoever has read much is sent more of it."""
    return [score(candidate, uncached=view.num_tokens - candidate.num_cached_tokens) for candidate in candidates]
