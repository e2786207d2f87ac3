"""The nouns of routing decisions. Everything here is a value or a pure function over values.

    RequestView, CandidateTable ──▶ Policy ──▶ Decision

A score is a cost: the lowest total wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from protos.codec import Value
from protos.values import WorkerRole
from router.routing.candidate_columns import CandidateTable, LaneLatencies, Line


class RequestView(Value, frozen=True, kw_only=True):
    """The facts about a request that a policy may use. `num_tokens` tokens must be in the KV cache before the next
    token can be computed: the prompt, and the tokens answered before the request changed workers. `num_decided` is the
    number of earlier decisions.

    An answer is expected to have `answer_tokens`; its first token is due within `within_s`. The KV of a block has
    `block_bytes` in layers without a window; `window_bytes` has each window of the others, with a block's bytes
    there. `lanes` are the measured lanes by prefill worker.
    """

    request_id: str
    num_tokens: int
    block_size: int
    num_decided: int = 0
    answer_tokens: float = 64.0
    within_s: float = math.inf
    block_bytes: int = 0
    window_bytes: Sequence[tuple[int, int]] = ()
    lanes: Mapping[str, LaneLatencies] = {}

    def lane(self, prefill_id: str, decode_id: str) -> Line | None:
        """None for a lane that was not measured."""
        return lanes.get(decode_id) if (lanes := self.lanes.get(prefill_id)) is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    worker_id: str
    role: WorkerRole
    total: float
    terms: tuple[tuple[str, float], ...] = ()


class SingleWorkerReason(StrEnum):
    COLOCATED = "colocated"
    NO_PREFILL_WORKER = "no prefill worker"
    STANDS_IN = "stands in for the decode pool"
    SHORT_REMAINDER = "short remainder"


CostUnit = Literal["", "s"]


class Decision(Value, frozen=True, kw_only=True):
    """`prefill` is None when the worker `decode` computes the prompt itself, for the reason `single_worker`. `scores`
    lists prefill workers before decode workers; of a large pool it keeps only the lowest scores and the chosen
    worker's. `cost_unit` is that of the scores, which not all policies have."""

    policy: str
    prefill: str | None
    decode: str
    single_worker: SingleWorkerReason | None = None
    cost_unit: CostUnit = ""
    scores: Sequence[Score] = ()


Policy = Callable[[RequestView, CandidateTable], Decision]
"""Chooses workers from all pools. A policy is pure and gets at least one candidate."""


def avoiding(policy: Policy, worker_ids: Collection[str]) -> Policy:
    """Avoids workers that have just failed the request, except where a pool has no other."""

    def decide(view: RequestView, candidates: CandidateTable) -> Decision:
        pools = (candidates.prefill_pool.besides(worker_ids), candidates.decode_pool.besides(worker_ids))
        places = candidates.workers.places
        return policy(
            view, candidates.take([places[worker_id] for pool in pools for worker_id in pool.workers.worker_ids])
        )

    return decide if worker_ids else policy


def shown_unit(unit: CostUnit) -> tuple[str, float]:
    return ("ms", 1000.0) if unit == "s" else ("", 1.0)


def cost_figure(cost: float) -> str:
    """Formats a cost for display. It has three significant digits, and all digits before the point; below 0.0005 it is
    0. The page formats costs the same way (router/admin/dashboard/script.js)."""
    if abs(cost) < 0.0005:
        return "0"
    return f"{cost:,.0f}" if abs(cost) >= 999.5 else f"{cost:.3g}"
