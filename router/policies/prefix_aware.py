"""Ranks that send a prompt to where its beginning is cached, unless the way there costs more than it saves.

All costs are in tokens to be read by the fastest worker of the pool. A worker of unknown speed counts as the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, RequestView, Score, score
from router.policies.costs import num_off_device, num_uncached

COMPUTING_WEIGHT = 2.0  # a token to be computed takes this request's time, and that of those queued behind it
TRANSFER_SHARE = 0.1  # moving the KV of a token, against computing it
LOAD_SHARE = 0.1  # loading it from the worker's own host
REQUEST_TOKENS = 64.0  # what one more running sequence slows its neighbours down by, in tokens read meanwhile
SHORTAGE_SHARE = 10.0  # a token without a free block waits for others to end, or evicts and recomputes them


def reading(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """What it takes until the prompt has been read: its uncached tokens, after those queued before it.

    Waiting for a sibling that is just being read is cheaper than reading the same prompt again elsewhere.
    """
    fastest = max(candidate.prefill_tokens_per_s for candidate in candidates)
    scores = []
    for candidate in candidates:
        slowness = fastest / (candidate.prefill_tokens_per_s or fastest) if fastest else 1.0
        scores.append(
            score(
                candidate,
                uncached=num_uncached(view, candidate) * COMPUTING_WEIGHT * slowness,
                load=candidate.num_host_tokens * LOAD_SHARE * slowness,
                queue=candidate.queued_prefill_tokens * slowness,
            )
        )
    return scores


def writing(view: RequestView, candidates: Sequence[Candidate]) -> Sequence[Score]:
    """What an answer costs where it is written: KV to be moved there, a place among the running, blocks to hold it."""
    steps = [candidate.decode_step_s for candidate in candidates if candidate.decode_step_s]
    quickest = min(steps, default=0.0)
    scores = []
    for candidate in candidates:
        slowness = candidate.decode_step_s / quickest if quickest and candidate.decode_step_s else 1.0
        absent = num_off_device(view, candidate)
        missing = max(0, absent - candidate.num_free_blocks * view.block_size)
        scores.append(
            score(
                candidate,
                transfer=absent * TRANSFER_SHARE,
                requests=candidate.num_requests * REQUEST_TOKENS * slowness,
                shortage=missing * SHORTAGE_SHARE,
            )
        )
    return scores
