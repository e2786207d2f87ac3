"""Ranks that send a prompt to where its beginning is cached, unless the way there costs more than it saves.

All costs are in tokens to be read by the fastest worker of the pool. A worker of unknown speed counts as the fastest.
"""

from __future__ import annotations

import numpy as np

from router.policies.base import RequestView
from router.policies.costs import num_off_device, num_uncached
from router.policies.table import Candidates, Floats, Scores, scores

COMPUTING_WEIGHT = 2.0  # a token to be computed takes this request's time, and that of those queued behind it
TRANSFER_SHARE = 0.1  # moving the KV of a token, against computing it
LOAD_SHARE = 0.1  # loading it from the worker's own host
REQUEST_TOKENS = 64.0  # what one more running sequence slows its neighbours down by, in tokens read meanwhile
SHORTAGE_SHARE = 10.0  # a token without a free block waits for others to end, or evicts and recomputes them


def reading(view: RequestView, candidates: Candidates) -> Scores:
    """What it takes until the prompt has been read: its uncached tokens, after those queued before it.

    Waiting for a sibling that is just being read is cheaper than reading the same prompt again elsewhere.
    """
    slowness = slower(candidates.prefill_tokens_per_s)
    return scores(
        candidates,
        uncached=num_uncached(view, candidates) * COMPUTING_WEIGHT * slowness,
        load=candidates.num_host_tokens * LOAD_SHARE * slowness,
        queue=candidates.queued_prefill_tokens * slowness,
    )


def writing(view: RequestView, candidates: Candidates) -> Scores:
    """What an answer costs where it is written: KV to be moved there, a place among the running, blocks to hold it."""
    steps = candidates.decode_step_s
    known = steps > 0
    slowness = np.where(known, steps / steps[known].min(), 1.0) if known.any() else np.ones(len(steps))
    absent = num_off_device(view, candidates)
    missing = np.maximum(0, absent - candidates.num_free_blocks * view.block_size)
    return scores(
        candidates,
        transfer=absent * TRANSFER_SHARE,
        requests=candidates.num_requests * REQUEST_TOKENS * slowness,
        shortage=missing * SHORTAGE_SHARE,
    )


def slower(speeds: Floats) -> Floats:
    """How many times slower each is than the fastest; one of unknown speed counts as the fastest."""
    fastest = speeds.max() or 1.0
    return fastest / np.where(speeds > 0, speeds, fastest)
