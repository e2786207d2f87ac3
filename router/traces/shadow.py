"""Policies that score live traffic without acting: what would have been different, had one of them decided."""

from __future__ import annotations

from dataclasses import dataclass

from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, Policy, RequestView
from router.routing.request_seconds import LatencyEstimate, estimate
from router.traces.request_trace import ShadowDecision


@dataclass(slots=True)
class ShadowTotals:
    """Sums over decisions of the predictions for the shadow's choice and for the actual one."""

    num_decisions: int = 0
    num_agreed: int = 0
    shadow_ttft_s: float = 0.0
    taken_ttft_s: float = 0.0
    shadow_hit_tokens: int = 0
    taken_hit_tokens: int = 0
    prompt_tokens: int = 0


class ShadowPolicy:
    """A policy that scores without acting. Its predictions are for the same moment by the same model, without later
    effects of its choices on caches and queues."""

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.tally = ShadowTotals()
        self._policy = policy

    def consider(
        self, view: RequestView, candidates: CandidateTable, taken: Decision, expected: LatencyEstimate
    ) -> ShadowDecision:
        decision = self._policy(view, candidates)
        seen = estimate(view, *candidates.pair(decision.prefill, decision.decode))
        tally = self.tally
        tally.num_decisions += 1
        tally.num_agreed += (decision.prefill, decision.decode) == (taken.prefill, taken.decode)
        tally.shadow_ttft_s += seen.ttft_s
        tally.taken_ttft_s += expected.ttft_s
        tally.shadow_hit_tokens += seen.num_cached_tokens
        tally.taken_hit_tokens += expected.num_cached_tokens
        tally.prompt_tokens += view.num_tokens
        return ShadowDecision(decision=decision, estimate=seen)
