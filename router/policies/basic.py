"""Ranks that do not look at caches: round robin, least loaded, the less loaded of two."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, RequestView, Score, score


def round_robin(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """Each in turn: the turn is the number of decisions before this one."""
    turn = view.num_decided % len(candidates)
    return [score(candidate, turn=(i - turn) % len(candidates)) for i, candidate in enumerate(candidates)]


def least_loaded(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """Fewest requests; a prompt waiting to be read counts by its blocks, of a thousand to a request."""
    return [
        score(
            candidate,
            requests=candidate.num_requests,
            queue=candidate.queued_prefill_tokens / view.block_size / 1000,
        )
        for candidate in candidates
    ]


def power_of_two(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """The less loaded of two drawn at random; the draw is a function of the request's id.

    Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
    """
    drawn = random.Random(view.request_id).sample(range(len(candidates)), k=min(2, len(candidates)))
    return least_loaded(view, [candidates[i] for i in drawn])
