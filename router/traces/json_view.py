"""Records as JSON. Times are seconds since the request arrived; `received_at` alone is the wall clock's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.routing.request_seconds import LatencyEstimate
from router.traces.request_trace import DecisionRecord, RequestTrace
from router.traces.shadow import ShadowPolicy

View = dict[str, Any]


def summary(record: RequestTrace, wall_offset_s: float) -> View:
    """`wall_offset_s`: the wall clock's time less the loop's."""
    timestamps, choice = record.timestamps, record.choices[-1] if record.choices else None
    return {
        "request_id": record.job.group_id,
        "job": record.job.request_id,
        "received_at": record.arrived_s + wall_offset_s,
        "state": "ended" if timestamps.ended_s is not None else "running" if choice else "waiting",
        "outcome": record.outcome,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": timestamps.num_cached_tokens,
        "output_tokens": timestamps.num_tokens,
        "drafted_tokens": timestamps.num_drafted,
        "accepted_drafts": timestamps.num_accepted,
        "paused_drafts": list(timestamps.paused_drafts),
        "ttft_s": _since(record, timestamps.first_s),
        "tpot_s": _tpot_s(record),
        "seconds": _since(record, timestamps.ended_s),
        "policy": choice.decision.policy if choice else None,
        "prefill": choice.decision.prefill if choice else None,
        "decode": record.decodes_at(choice.decision) if choice else None,
        "embedding": bool(record.job.sampling.pooling),
        "decisions": len(record.choices),
        "failures": record.num_failures,
    }


def whole(record: RequestTrace, wall_offset_s: float) -> View:
    return summary(record, wall_offset_s) | {
        "message": record.message,
        "session": record.job.session,
        "tenant": record.job.tenant,
        "choices": [_choice(record, choice) for choice in record.choices],
        "timeline": _timeline(record),
    }


def shadow_view(shadow: ShadowPolicy) -> View:
    tally = shadow.tally
    count, tokens = tally.num_decisions or 1, tally.prompt_tokens or 1
    return {
        "policy": shadow.name,
        "decisions": tally.num_decisions,
        "prompt_tokens": tally.prompt_tokens,
        "agreement": tally.num_agreed / count,
        "predicted_ttft_s": tally.shadow_ttft_s / count,
        "taken_predicted_ttft_s": tally.taken_ttft_s / count,
        "ttft_difference_s": (tally.shadow_ttft_s - tally.taken_ttft_s) / count,
        "hit_rate": tally.shadow_hit_tokens / tokens,
        "taken_hit_rate": tally.taken_hit_tokens / tokens,
        "hit_difference": (tally.shadow_hit_tokens - tally.taken_hit_tokens) / tokens,
    }


def _choice(record: RequestTrace, choice: DecisionRecord) -> View:
    decision = choice.decision
    return {
        "at_s": choice.at_s - record.arrived_s,
        "policy": decision.policy,
        "prefill": decision.prefill,
        "decode": record.decodes_at(decision),
        "single_worker": decision.single_worker,
        "cost_unit": decision.cost_unit,
        "expected": choice.estimate,
        "scores": [
            {"worker_id": score.worker_id, "role": score.role, "total": score.total, "terms": dict(score.terms)}
            for score in decision.scores
        ],
        "candidates": list(choice.candidates),
        "num_candidates": choice.num_candidates,
        "shadows": [
            {
                "policy": shadow.decision.policy,
                "prefill": shadow.decision.prefill,
                "decode": shadow.decision.decode,
                "expected": shadow.estimate,
                "ttft_difference_s": shadow.estimate.ttft_s - choice.estimate.ttft_s,
            }
            for shadow in choice.shadows
        ],
        "measured": _measured(record, choice.estimate) if choice is record.choices[-1] else None,
    }


def _measured(record: RequestTrace, expected: LatencyEstimate) -> View:
    """Measures the first token from the decision that led to it."""
    first_s, decided_s = record.timestamps.first_s, record.choices[-1].at_s
    ttft_s = first_s - decided_s if first_s is not None and first_s >= decided_s else None
    tpot_s = _tpot_s(record)
    return {
        "ttft_s": ttft_s,
        "ttft_error_s": ttft_s - expected.ttft_s if ttft_s is not None else None,
        "tpot_s": tpot_s,
        "tpot_error_s": tpot_s - expected.tpot_s if tpot_s is not None else None,
    }


def _timeline(record: RequestTrace) -> Sequence[View]:
    events: list[View] = [
        {"at_s": event.at_s - record.arrived_s, "what": str(event.what), **event.facts} for event in record.events
    ]
    timestamps = record.timestamps
    if timestamps.last_s is not None and timestamps.num_tokens > 1:
        last = {"at_s": timestamps.last_s - record.arrived_s, "what": "last token", "tokens": timestamps.num_tokens}
        events.append(last)
    return sorted(events, key=lambda event: (event["at_s"], event["what"] == "ended"))


def _tpot_s(record: RequestTrace) -> float | None:
    timestamps = record.timestamps
    if timestamps.first_s is None or timestamps.last_s is None or timestamps.num_tokens < 2:
        return None
    return (timestamps.last_s - timestamps.first_s) / (timestamps.num_tokens - 1)


def _since(record: RequestTrace, moment_s: float | None) -> float | None:
    return moment_s - record.arrived_s if moment_s is not None else None
