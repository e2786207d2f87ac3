"""Policies that ignore caches: round robin, least loaded."""

from __future__ import annotations

import numpy as np

from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Policy, RequestView
from router.routing.pair import ShortRemainder, pair
from router.routing.scores import PoolScores, pool_scores


def round_robin(config: RouterConfig) -> Policy:
    return pair("round_robin", prefill=_turns, decode=_turns, short=ShortRemainder.of(config))


def least_loaded(config: RouterConfig) -> Policy:
    return pair("least_loaded", prefill=load, decode=load, short=ShortRemainder.of(config))


def _turns(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """The term `turn` is the number of decisions until the worker's turn."""
    count = len(candidates)
    places = np.arange(count, dtype=np.float64)
    return pool_scores(candidates, turn=(places - view.num_decided % count) % count)


def load(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """Scores by the number of requests. A thousand queued prompt blocks count as one more request."""
    queue = candidates.queued_prefill_tokens / view.block_size / 1000
    return pool_scores(candidates, requests=candidates.num_requests, queue=queue)
