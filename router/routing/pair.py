"""The joint choice of the worker that computes a prompt and the worker that decodes its answer.

    for each decode worker d:   cost(d) = decode(d) + prefill by d itself                       if d serves both halves
                                          decode(d) + prefill by p + KV from p to d, the best p      else

A worker d serves both halves in three cases: it is colocated, there is no prefill worker, or d lacks so little of the
prompt that a transfer would not pay (conditional disaggregation). Where costs are seconds, the third case also requires
that the seconds agree: otherwise a decode worker that lacks more of a prompt would be preferred, because it gets a
prefill worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protos.values import WorkerRole
from router.router_config import RouterConfig
from router.routing.candidate_columns import Bools, CandidateTable, Floats, LaneLatencies, Places
from router.routing.decision import CostUnit, Decision, Policy, RequestView, SingleWorkerReason
from router.routing.request_seconds import num_uncached
from router.routing.scores import CostBreakdown, PoolScores, Rank, cheapest, scored_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRemainder:
    """A remainder is short when it is below both bounds: a number of tokens, and a share of the request's tokens."""

    max_tokens: int
    max_share: float

    @classmethod
    def of(cls, config: RouterConfig) -> ShortRemainder:
        return cls(max_tokens=config.local_prefill_tokens, max_share=config.local_prefill_share)

    def __call__(self, view: RequestView, decode: CandidateTable) -> Bools:
        missing = num_uncached(view, decode)
        return (missing < self.max_tokens) & (missing < self.max_share * view.num_tokens)


TransferCost = Callable[[RequestView, Sequence[str], CandidateTable], Floats]
"""[prefill workers, decode workers]: the cost of sending KV from each of these prefill workers to each decode
worker."""

NEAR_PREFILL = 8  # the number of cheapest prefill workers for which lanes are compared
MAX_SCORES = 16
"""The number of a pool's lowest scores that a decision keeps, besides the chosen worker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefillChoice:
    """For each decode worker: the index of its prefill worker in `scores`, or -1 for itself; the `cost` of the prefill;
    the `transfer` cost of its KV, NaN without a transfer."""

    scores: PoolScores | None
    place: Places
    cost: Floats
    transfer: Floats | None = None

    def worker_id(self, place: int) -> str | None:
        by = int(self.place[place])
        return self.scores.workers.worker_ids[by] if self.scores is not None and by >= 0 else None


def pair(
    name: str,
    *,
    prefill: Rank,
    decode: Rank,
    short: ShortRemainder,
    transfer: TransferCost | None = None,
    tolerance: float = 0.0,
    unit: CostUnit = "",
) -> Policy:
    """Builds the policy called `name` from a rank of prefill workers and a rank of decode workers. The costs of both
    are in `unit`, so that they can be added. Costs that differ by less than the share `tolerance` are equal."""

    def decide(view: RequestView, candidates: CandidateTable) -> Decision:
        return without_choice(view, candidates) or weigh(view, candidates)

    def without_choice(view: RequestView, candidates: CandidateTable) -> Decision | None:
        """The decision if only one pair is possible. The pair is weighed when its scores are read."""
        prefill_ids, pool = candidates.workers.prefill_pool.workers.worker_ids, candidates.workers.decode_pool.workers
        if len(pool) != 1 or len(prefill_ids) > 1:
            return None
        [worker_id], [role] = pool.worker_ids, pool.roles
        is_bound = role is WorkerRole.COLOCATED or not prefill_ids
        single = is_bound or bool(short(view, candidates.decode_pool)[0])
        if single and not is_bound and transfer is not None:
            return None  # a transfer may take less
        seen = replace(view, lanes=_lanes_to(worker_id, prefill_ids, view)) if prefill_ids else view
        return Decision(
            policy=name,
            prefill=None if single else prefill_ids[0],
            decode=worker_id,
            single_worker=_reason(role, has_prefill=bool(prefill_ids)) if single else None,
            cost_unit=unit,
            scores=CostBreakdown(lambda: _parts(weigh(seen, candidates))),
        )

    def weigh(view: RequestView, candidates: CandidateTable) -> Decision:
        prefill_pool, pool = candidates.prefill_pool, candidates.decode_pool
        assert len(pool), "the dispatcher waits until there is a worker"
        decoding = decode(view, pool)
        if len(prefill_pool):
            prefilling, colocated, is_short = prefill(view, prefill_pool), pool.workers.colocated, short(view, pool)
            single = colocated | is_short
            chosen = _disaggregated(view, prefilling, prefill_pool, pool, transfer, tolerance)
            if single.any():
                own = prefill(view, pool)
                if chosen.transfer is not None:
                    handed = _unsteered(prefilling)[chosen.place] + chosen.transfer
                    single = colocated | is_short & (_unsteered(own) <= (1 + tolerance) * handed)
                chosen = _or_single_worker(chosen, single, own.totals)
        else:
            single = np.ones(len(pool), dtype=np.bool_)
            chosen = _PrefillChoice(scores=None, place=np.full(len(pool), -1), cost=prefill(view, pool).totals)
        costs = decoding.totals if chosen.transfer is None else decoding.totals + _or_zero(chosen.transfer)
        totals = costs + chosen.cost
        place = cheapest(_evened(totals, chosen.cost, tolerance), view, among=pool if tolerance else None)
        reason = _reason(pool.workers.roles[place], has_prefill=len(prefill_pool) > 0) if single[place] else None
        return Decision(
            policy=name,
            prefill=chosen.worker_id(place),
            decode=pool.workers.worker_ids[place],
            single_worker=reason,
            cost_unit=unit,
            scores=CostBreakdown(lambda: _kept_scores(decoding, totals, chosen, place)),
        )

    return decide


def _lanes_to(decode_id: str, prefill_ids: Sequence[str], view: RequestView) -> Mapping[str, LaneLatencies]:
    measured = [(prefill_id, view.lane(prefill_id, decode_id)) for prefill_id in prefill_ids]
    return {prefill_id: LaneLatencies({decode_id: line}) for prefill_id, line in measured if line is not None}


def _disaggregated(
    view: RequestView,
    prefilling: PoolScores,
    prefill_pool: CandidateTable,
    decode_pool: CandidateTable,
    transfer: TransferCost | None,
    tolerance: float,
) -> _PrefillChoice:
    """For each decode worker the cheapest of its near prefill workers, lanes included. The best prefill worker is kept
    unless another is cheaper by more than the tolerance."""
    count, totals = len(decode_pool), prefilling.totals
    slack = tolerance * float(totals.min())
    best = cheapest(totals, view, slack=slack, among=prefill_pool if tolerance else None)
    if transfer is None:
        return _PrefillChoice(scores=prefilling, place=np.full(count, best), cost=np.full(count, totals[best]))
    near, worker_ids = prefilling.cheapest(NEAR_PREFILL), prefilling.workers.worker_ids
    if best not in near:
        near = np.array([best])
    costs, handed = totals[near], transfer(view, [worker_ids[place] for place in near], decode_pool)
    cheapest_rows = (costs[:, None] + handed).argmin(axis=0)
    columns, first = np.arange(count), int(np.flatnonzero(near == best)[0])
    gain = costs[first] + handed[first] - costs[cheapest_rows] - handed[cheapest_rows, columns]
    rows = np.where(gain > slack, cheapest_rows, first)
    return _PrefillChoice(scores=prefilling, place=near[rows], cost=costs[rows], transfer=handed[rows, columns])


def _or_single_worker(chosen: _PrefillChoice, single: Bools, own: Floats) -> _PrefillChoice:
    return _PrefillChoice(
        scores=chosen.scores,
        place=np.where(single, -1, chosen.place),
        cost=np.where(single, own, chosen.cost),
        transfer=None if chosen.transfer is None else np.where(single, np.nan, chosen.transfer),
    )


def _unsteered(scores: PoolScores) -> Floats:
    """The totals without the term that evens out a pool's load, which cannot compare workers of two pools."""
    return scores.totals - dict(scores.terms).get("imbalance", 0.0)


def _or_zero(transfer: Floats) -> Floats:
    return np.where(np.isnan(transfer), 0.0, transfer)


def _evened(totals: Floats, prefill: Floats, tolerance: float) -> Floats:
    """The totals without prefill differences or decode differences below `tolerance`. Otherwise an answer that takes
    seconds on every worker would hide which worker computes the prompt soonest."""
    decode = totals - prefill
    least_prefill, least_decode = (1 + tolerance) * prefill.min(), (1 + tolerance) * decode.min()
    evened: Floats = np.maximum(prefill, least_prefill) + np.maximum(decode, least_decode)
    return evened


def _reason(role: WorkerRole, *, has_prefill: bool) -> SingleWorkerReason:
    if role is WorkerRole.COLOCATED:
        return SingleWorkerReason.COLOCATED
    if role is WorkerRole.PREFILL:
        return SingleWorkerReason.STANDS_IN
    return SingleWorkerReason.SHORT_REMAINDER if has_prefill else SingleWorkerReason.NO_PREFILL_WORKER


# -- the scores that a decision keeps ----------------------------------------------------------------------------------


def _parts(decision: Decision) -> Sequence[PoolScores]:
    assert isinstance(decision.scores, CostBreakdown)
    return decision.scores.parts


def _kept_scores(decoding: PoolScores, totals: Floats, chosen: _PrefillChoice, place: int) -> Sequence[PoolScores]:
    transfer = [] if chosen.transfer is None else [("transfer", chosen.transfer)]
    whole = PoolScores(decoding.workers, totals, (*decoding.terms, *transfer, ("prefill", chosen.cost)))
    lowest = _lowest(whole, place)
    prefill_ids = () if chosen.scores is None else chosen.scores.workers.worker_ids
    names = [
        f"prefill by {prefill_ids[by] if by >= 0 else decoding.workers.worker_ids[at]}"
        for at, by in zip(lowest, chosen.place[lowest].tolist(), strict=True)
    ]
    whole = whole.take(lowest).renamed("prefill", names)
    by = int(chosen.place[place])
    return [whole] if chosen.scores is None else [chosen.scores.take(_lowest(chosen.scores, by)), whole]


def _lowest(scores: PoolScores, chosen: int) -> Sequence[int]:
    if len(scores) <= MAX_SCORES:
        return range(len(scores))
    lowest = set(scores.cheapest(MAX_SCORES).tolist())
    return sorted(lowest | {chosen} if chosen >= 0 else lowest)


def kept_candidates(candidates: CandidateTable, decision: Decision) -> CandidateTable:
    """The candidates that a record keeps. A small table is kept whole. Of a large one, the record keeps the candidates
    whose scores the decision keeps, and the other worker that had most of the prompt cached."""
    if len(candidates) <= 2 * MAX_SCORES:
        return candidates
    workers, prefill_id = candidates.workers, decision.prefill or decision.decode
    by = workers.places[prefill_id]
    pool = workers.prefill_pool if prefill_id in workers.prefill_pool.workers.places else workers.decode_pool
    rivals = candidates.num_cached_tokens.copy()
    rivals[by] = -1
    rival = pool.workers.worker_ids[int(rivals[pool.columns].argmax())]
    worker_ids = {*scored_workers(decision.scores), prefill_id, decision.decode, rival}
    return candidates.take(sorted(workers.places[worker_id] for worker_id in worker_ids))
