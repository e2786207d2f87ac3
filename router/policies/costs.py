"""The seconds a request takes on a candidate or a pair: what `slo` weighs, and what every decision is held against.

decided ──overhead──▶ ──queue──▶ ──load──▶ ──compute──▶ first token ──transfer──▶ second ──step──▶ ... ──step──▶ last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies.base import Candidate, Decision, RequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of a decision. `num_cached_tokens` are those that its reader has, `num_host_tokens` of them on
    its host: loading them takes `load_s`. Seconds to the first token are from the decision on; `transfer_s` is what the
    second token waits for its KV."""

    ttft_s: float
    tpot_s: float
    transfer_s: float
    num_cached_tokens: int
    num_host_tokens: int = 0
    load_s: float = 0.0


def num_uncached(view: RequestView, candidate: Candidate) -> int:
    return view.num_tokens - candidate.num_cached_tokens


def num_off_device(view: RequestView, candidate: Candidate) -> int:
    """What needs room on the device, wherever it comes from."""
    return num_uncached(view, candidate) + candidate.num_host_tokens


def load_s(candidate: Candidate) -> float:
    """Until what its host has is on the device; a worker computes instead where that takes less."""
    num_tokens = candidate.num_host_tokens
    return min(candidate.loading(num_tokens), candidate.reading.each_s * num_tokens) if num_tokens else 0.0


def ttft_s(view: RequestView, reader: Candidate) -> float:
    """To the first token, behind what the reader has to read already."""
    return reader.reading(reader.queued_prefill_tokens + num_uncached(view, reader)) + load_s(reader)


def tpot_s(writer: Candidate) -> float:
    """Between tokens, with one sequence more than there are."""
    return writer.stepping(writer.num_requests + 1)


def transfer_s(view: RequestView, reader: Candidate, writer: Candidate) -> float:
    """How long an answer is held up for its KV: what the writer's device lacks, over the lane between the two."""
    lane = view.lanes.get((reader.worker_id, writer.worker_id), writer.receiving)
    return lane(num_off_device(view, writer) / view.block_size * view.block_bytes)


def outlook(view: RequestView, candidates: Sequence[Candidate], decision: Decision) -> Outlook:
    """What to expect of a decision, whatever policy made it."""
    by_id = {candidate.worker_id: candidate for candidate in candidates}
    writer = by_id[decision.decode]
    reader = writer if decision.prefill is None else by_id[decision.prefill]
    return Outlook(
        ttft_s=ttft_s(view, reader),
        tpot_s=tpot_s(writer),
        transfer_s=0.0 if reader is writer else transfer_s(view, reader, writer),
        num_cached_tokens=reader.num_cached_tokens,
        num_host_tokens=reader.num_host_tokens,
        load_s=load_s(reader),
    )
