"""The seconds that a request takes on each candidate. `slo` weighs them; the estimate of every decision is made of
them.

decided ──overhead──▶ ──queue──▶ ──load──▶ ──compute──▶ first token ──transfer──▶ second ──step──▶ ... ──step──▶ last
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protos.codec import Value
from router.routing.candidate_columns import Candidate, CandidateTable, Floats, Numbers, WorkerNumbers, where
from router.routing.decision import RequestView


class LatencyEstimate(Value, frozen=True, kw_only=True):
    """The expected times of a decision. The prefill worker has `num_cached_tokens` cached; `num_host_tokens` of them
    are in host memory and load in `load_s`. The time to the first token begins with the decision; the second token
    waits `transfer_s` for its KV."""

    ttft_s: float
    tpot_s: float
    transfer_s: float
    num_cached_tokens: int
    num_host_tokens: int = 0
    load_s: float = 0.0


def num_uncached(view: RequestView, candidates: WorkerNumbers[Numbers]) -> Numbers:
    return view.num_tokens - candidates.num_cached_tokens


def num_off_device(view: RequestView, candidates: WorkerNumbers[Numbers]) -> Numbers:
    return num_uncached(view, candidates) + candidates.num_host_tokens


def load_s(candidates: WorkerNumbers[Numbers]) -> Numbers:
    """Seconds to load the host's tokens, at most those to compute them."""
    num_tokens = candidates.num_host_tokens
    loaded_s, computed_s = candidates.load_time(num_tokens), candidates.prefill_time.each_s * num_tokens
    return where(loaded_s < computed_s, loaded_s, computed_s)


def ttft_s(view: RequestView, candidates: WorkerNumbers[Numbers], load: Numbers) -> Numbers:
    """Seconds to the first token after the queued prompts. `load` is `load_s` of the same candidates."""
    queued = candidates.queued_prefill_tokens + num_uncached(view, candidates)
    return candidates.prefill_time(queued) + load


def tpot_s(candidates: WorkerNumbers[Numbers]) -> Numbers:
    return candidates.step_time(candidates.num_requests + 1)


def transfer_s(view: RequestView, prefill_ids: Sequence[str], decode: CandidateTable) -> Floats:
    """[prefill workers, decode workers]: seconds that an answer waits for its KV. The lane between the two workers
    carries the tokens that the decode worker's device lacks."""
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


def handed_bytes(view: RequestView, decode: WorkerNumbers[Numbers]) -> Numbers:
    """Bytes of KV that a decode worker needs from a prefill worker: of a window only its positions."""
    num_tokens = num_off_device(view, decode)
    num_bytes = num_tokens / view.block_size * view.block_bytes
    for window, block_bytes in view.window_bytes:
        num_bytes = num_bytes + where(num_tokens < window, num_tokens, window) / view.block_size * block_bytes
    return num_bytes


def estimate(view: RequestView, prefill: Candidate, decode: Candidate) -> LatencyEstimate:
    load, handed_s = load_s(prefill), 0.0
    if decode is not prefill:
        lane = view.lane(prefill.worker_id, decode.worker_id) or decode.transfer_time
        handed_s = lane(handed_bytes(view, decode))
    return LatencyEstimate(
        ttft_s=ttft_s(view, prefill, load),
        tpot_s=tpot_s(decode),
        transfer_s=handed_s,
        num_cached_tokens=prefill.num_cached_tokens,
        num_host_tokens=prefill.num_host_tokens,
        load_s=load,
    )
