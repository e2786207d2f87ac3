"""The policy that sends a prompt to where its beginning is cached, unless the queue there costs more than it saves.

All costs are in prompt tokens computed by the fastest worker of the pool. A worker of unknown speed counts as the
fastest.
"""

from __future__ import annotations

import numpy as np

from router.config import RouterConfig
from router.policies.base import Policy, RequestView
from router.policies.costs import num_off_device, num_uncached
from router.policies.limits import balanced
from router.policies.pair import ShortRemainder, pair
from router.policies.scores import PoolScores, pool_scores
from router.policies.table import CandidateTable, Floats

COMPUTING_WEIGHT = 2.0  # a token to be computed takes this request's time, and that of those queued behind it
TRANSFER_SHARE = 0.1  # moving the KV of a token, against computing it
LOAD_SHARE = 0.1  # loading it from the worker's own host
REQUEST_TOKENS = 64.0  # share by which one more running sequence slows down its neighbours
SHORTAGE_SHARE = 10.0  # a token without a free block waits for others to end, or evicts and recomputes them


def prefix_aware(config: RouterConfig) -> Policy:
    short = ShortRemainder.of(config)
    return pair("prefix_aware", prefill=balanced(_prefill), decode=balanced(_decode), short=short)


def _prefill(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """The prompt's uncached tokens, after those queued before it.

    Waiting for the prefill of a prompt with the same beginning is cheaper than a second prefill elsewhere.
    """
    slowness = _slowness(candidates.prefill_tokens_per_s)
    return pool_scores(
        candidates,
        uncached=num_uncached(view, candidates) * COMPUTING_WEIGHT * slowness,
        load=candidates.num_host_tokens * LOAD_SHARE * slowness,
        queue=candidates.queued_prefill_tokens * slowness,
    )


def _decode(view: RequestView, candidates: CandidateTable) -> PoolScores:
    """KV to be moved to the worker, a place among its running sequences, and blocks to hold the answer."""
    steps = candidates.decode_step_s
    known = steps > 0
    slowness = np.where(known, steps / steps[known].min(), 1.0) if known.any() else np.ones(len(steps))
    absent = num_off_device(view, candidates)
    missing = np.maximum(0, absent - candidates.num_free_blocks * view.block_size)
    return pool_scores(
        candidates,
        transfer=absent * TRANSFER_SHARE,
        requests=candidates.num_requests * REQUEST_TOKENS * slowness,
        shortage=missing * SHORTAGE_SHARE,
    )


def _slowness(speeds: Floats) -> Floats:
    """How many times slower each is than the fastest; one of unknown speed counts as the fastest."""
    fastest = speeds.max() or 1.0
    return fastest / np.where(speeds > 0, speeds, fastest)
