"""A policy that sends a prompt to the worker with its beginning cached, unless the queue there costs more than that
saves.

All costs are in prompt tokens computed by the fastest worker of the pool. A worker of unknown speed counts as the
fastest.
"""

from __future__ import annotations

import numpy as np

from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable, Floats
from router.routing.decision import Policy, RequestView
from router.routing.pair import ShortRemainder, pair
from router.routing.request_seconds import num_off_device, num_uncached
from router.routing.scores import PoolScores, Rank, pool_scores

MAX_DIFFERENCE = 32
MAX_RATIO = 1.1
FORBIDDING = 1e9  # per excess request: no other cost comes near it
COMPUTING_WEIGHT = 2.0  # a token to be computed delays this request and those queued behind it
TRANSFER_SHARE = 0.1  # cost of moving a token's KV, relative to computing the token
LOAD_SHARE = 0.1  # cost of loading a token from the worker's own host, relative to computing it
REQUEST_TOKENS = 64.0  # share by which one more running sequence slows down its neighbours
SHORTAGE_SHARE = 10.0  # a token without a free block waits for other answers to end, or evicts and recomputes them


def balanced(rank: Rank) -> Rank:
    """Follows `rank` while its pool is balanced, and otherwise prefers the shortest queue.

    A pool is unbalanced when its longest queue exceeds the shortest by over 32 requests and is over 1.1 times as long.
    These are the bounds of SGLang's cache-aware router.
    """

    def guarded(view: RequestView, candidates: CandidateTable) -> PoolScores:
        queues, ranked = candidates.num_requests, rank(view, candidates)
        longest, shortest = queues.max(), queues.min()
        if longest - shortest > MAX_DIFFERENCE and longest > MAX_RATIO * shortest:
            return ranked.plus(imbalance=(queues - shortest) * FORBIDDING)
        return ranked

    return guarded


def prefix_aware(config: RouterConfig) -> Policy:
    short = ShortRemainder.of(config)
    return pair("prefix_aware", prefill=balanced(_prefill), decode=balanced(_decode), short=short)


def _prefill(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """Scores by the prompt's uncached tokens and the tokens queued before it. A queued prompt with the same beginning
    attracts the request: waiting for its prefill is cheaper than a second prefill elsewhere."""
    slowness = _slowness(candidates.prefill_tokens_per_s)
    return pool_scores(
        candidates,
        uncached=num_uncached(view, candidates) * COMPUTING_WEIGHT * slowness,
        load=candidates.num_host_tokens * LOAD_SHARE * slowness,
        queue=candidates.queued_prefill_tokens * slowness,
    )


def _decode(view: RequestView, candidates: CandidateTable) -> PoolScores:
    steps = candidates.decode_step_s
    measured = steps > 0
    slowness = np.where(measured, steps / steps[measured].min(), 1.0) if measured.any() else np.ones(len(steps))
    absent = num_off_device(view, candidates)
    missing = np.maximum(0, absent - candidates.num_free_blocks * view.block_size)
    return pool_scores(
        candidates,
        transfer=absent * TRANSFER_SHARE,
        requests=candidates.num_requests * REQUEST_TOKENS * slowness,
        shortage=missing * SHORTAGE_SHARE,
    )


def _slowness(speeds: Floats) -> Floats:
    fastest = speeds.max() or 1.0
    return fastest / np.where(speeds > 0, speeds, fastest)
