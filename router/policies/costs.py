"""The seconds that a request takes on candidates: what `slo` weighs, and what every decision is compared with.

decided ──overhead──▶ ──queue──▶ ──load──▶ ──compute──▶ first token ──transfer──▶ second ──step──▶ ... ──step──▶ last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.policies.base import Decision, RequestView
from router.policies.table import CandidateTable, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyEstimate:
    """What is expected of a decision. The worker that computes the prompt has `num_cached_tokens` of it,
    `num_host_tokens` of them on its host; loading those takes `load_s`. The time to the first token begins with the
    decision; the second token waits `transfer_s` for its KV."""

    ttft_s: float
    tpot_s: float
    transfer_s: float
    num_cached_tokens: int
    num_host_tokens: int = 0
    load_s: float = 0.0


def num_uncached(view: RequestView, candidates: CandidateTable) -> Floats:
    return view.num_tokens - candidates.num_cached_tokens


def num_off_device(view: RequestView, candidates: CandidateTable) -> Floats:
    """Tokens that need room on the device, whether they are loaded, received or computed."""
    return num_uncached(view, candidates) + candidates.num_host_tokens


def load_s(candidates: CandidateTable) -> Floats:
    """Until the tokens of the host are on the device; a worker computes them instead where that takes less."""
    num_tokens = candidates.num_host_tokens
    return np.minimum(candidates.load_time(num_tokens), candidates.prefill_time.each_s * num_tokens)


def ttft_s(view: RequestView, candidates: CandidateTable, load: Floats) -> Floats:
    """To the first token, behind the prompts that are queued already; `load` is `load_s` of the same candidates."""
    queued = candidates.queued_prefill_tokens + num_uncached(view, candidates)
    return candidates.prefill_time(queued) + load


def tpot_s(candidates: CandidateTable) -> Floats:
    """Between tokens, with one sequence more than there are."""
    return candidates.step_time(candidates.num_requests + 1)


def transfer_s(view: RequestView, prefill_ids: Sequence[str], decode: CandidateTable) -> Floats:
    """[prefill workers, decode workers]: how long an answer waits for its KV, which is what the decode worker's device
    lacks, over the lane between the two."""
    num_bytes = handed_bytes(view, decode)
    unmeasured = decode.transfer_time(num_bytes)
    seconds = np.empty((len(prefill_ids), len(decode)))
    for row, prefill_id in zip(seconds, prefill_ids, strict=True):
        if lanes := view.lanes.get(prefill_id):
            measured = lanes.lines(decode.workers)(num_bytes)
            np.copyto(row, np.where(np.isnan(measured), unmeasured, measured))
        else:
            row[:] = unmeasured
    return seconds


def handed_bytes(view: RequestView, decode: CandidateTable) -> Floats:
    """Bytes of KV that a decode worker needs from a prefill worker."""
    return num_off_device(view, decode) / view.block_size * view.block_bytes


def estimate(view: RequestView, candidates: CandidateTable, decision: Decision) -> LatencyEstimate:
    """What to expect of a decision, by whichever policy."""
    prefill, decode = candidates.only(decision.prefill or decision.decode), candidates.only(decision.decode)
    load, handed_s = load_s(prefill), 0.0
    if decision.prefill is not None:
        lane = view.lane(decision.prefill, decision.decode)
        [num_bytes] = handed_bytes(view, decode).tolist()
        handed_s = lane(num_bytes) if lane is not None else decode.transfer_time(num_bytes).item()
    return LatencyEstimate(
        ttft_s=ttft_s(view, prefill, load).item(),
        tpot_s=tpot_s(decode).item(),
        transfer_s=handed_s,
        num_cached_tokens=int(prefill.num_cached_tokens.item()),
        num_host_tokens=int(prefill.num_host_tokens.item()),
        load_s=load.item(),
    )
