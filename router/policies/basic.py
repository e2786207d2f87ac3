"""Ranks that do not look at caches: round robin, least loaded, the less loaded of two."""

from __future__ import annotations

import random

import numpy as np

from router.policies.base import RequestView
from router.policies.table import Candidates, Scores, scores


def round_robin(view: RequestView, candidates: Candidates) -> Scores:
    """Each in turn: the turn is the number of decisions before this one."""
    count = len(candidates)
    places = np.arange(count, dtype=np.float64)
    return scores(candidates, turn=(places - view.num_decided % count) % count)


def least_loaded(view: RequestView, candidates: Candidates) -> Scores:
    """Fewest requests; a prompt waiting to be read counts by its blocks, of a thousand to a request."""
    return scores(
        candidates,
        requests=candidates.num_requests,
        queue=candidates.queued_prefill_tokens / view.block_size / 1000,
    )


def power_of_two(view: RequestView, candidates: Candidates) -> Scores:
    """The less loaded of two drawn at random; the draw is a function of the request's id.

    Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
    """
    drawn = random.Random(view.request_id).sample(range(len(candidates)), k=min(2, len(candidates)))
    return least_loaded(view, candidates.take(drawn)).at(drawn)
