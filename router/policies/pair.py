"""The joint choice of who reads a prompt and who writes its answer.

    for each decode worker d:   cost(d) = writing(d) + reading by d itself                            if d works alone
                                          writing(d) + reading by p + KV from p to d, the best p      else

d works alone when it serves both halves anyway, when there is no prefill worker, or when so little of the prompt is
missing on it that handing KV over would not pay (conditional disaggregation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from protos.values import WorkerRole
from router.policies.base import Alone, Candidate, Decision, Policy, Rank, RequestView, Score, cheapest, score


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRemainder:
    """A remainder is short below both bounds: tokens, and share of all the request's tokens."""

    max_tokens: int
    max_share: float

    def __call__(self, view: RequestView, decode: Candidate) -> bool:
        missing = view.num_tokens - decode.num_cached_tokens
        return missing < self.max_tokens and missing < self.max_share * view.num_tokens


Between = Callable[[RequestView, Candidate, Candidate], float]
"""The cost of handing KV over from a reader to a writer."""

NEAR_READERS = 8  # that may win by a better lane; those behind them would have to be better by far


def pair(
    name: str, *, read: Rank, write: Rank, short: ShortRemainder, between: Between | None = None, tolerance: float = 0.0
) -> Policy:
    """A policy called `name`, from a rank of readers and a rank of writers whose costs can be added up. Costs that
    differ by less than the share `tolerance` of them are equal."""

    def decide(view: RequestView, candidates: Sequence[Candidate]) -> Decision:
        readers = {one.worker_id: one for one in candidates if one.role is WorkerRole.PREFILL}
        writers = {candidate.worker_id: candidate for candidate in candidates if decodes(candidate)}
        assert writers, "the dispatcher waits until somebody can decode"
        reading = read(view, list(readers.values())) if readers else ()
        slack = tolerance * min((one.total for one in reading), default=0.0)
        best = cheapest(reading, view, slack=slack) if reading else None
        near = nsmallest(NEAR_READERS, reading, key=lambda one: one.total) if between is not None else ()
        writings = write(view, list(writers.values()))
        offered = [writers[writing.worker_id] for writing in writings]
        why = {one.worker_id: _alone(view, one, short, has_readers=best is not None) for one in offered}
        own = {one.worker_id: one for one in read(view, offered)} if any(why.values()) else {}
        whole: list[Score] = []
        by: dict[str, tuple[Score, Alone | None]] = {}
        for writing in writings:
            writer = writers[writing.worker_id]
            terms = dict(writing.terms)
            alone = why[writer.worker_id]
            reader = best
            if alone or reader is None:
                reader = own[writer.worker_id]
            elif between is not None:
                handing = {one.worker_id: between(view, readers[one.worker_id], writer) for one in near}
                reader = _nearest(reader, near, handing, slack)
                terms["transfer"] = handing.get(reader.worker_id) or between(view, readers[reader.worker_id], writer)
            by[writer.worker_id] = (reader, alone)
            whole.append(score(writer, **terms, **{f"reading by {reader.worker_id}": reader.total}))
        chosen = cheapest(_evened(whole, {name: reader.total for name, (reader, _) in by.items()}, tolerance), view)
        reader, alone = by[chosen.worker_id]
        return Decision(
            policy=name,
            prefill=None if alone else reader.worker_id,
            decode=chosen.worker_id,
            alone=alone,
            scores=(*reading, *whole),
        )

    return decide


def _evened(whole: Sequence[Score], reading: Mapping[str, float], tolerance: float) -> Sequence[Score]:
    """Without what differs less than `tolerance` in reading, or in writing: an answer of seconds that all would write
    alike must not hide which of them reads the prompt soonest."""
    writing = {one.worker_id: one.total - reading[one.worker_id] for one in whole}
    least_read, least_write = (1 + tolerance) * min(reading.values()), (1 + tolerance) * min(writing.values())
    return [
        replace(one, total=max(reading[one.worker_id], least_read) + max(writing[one.worker_id], least_write))
        for one in whole
    ]


def decodes(candidate: Candidate) -> bool:
    return candidate.role in (WorkerRole.DECODE, WorkerRole.COLOCATED)


def _alone(view: RequestView, writer: Candidate, short: ShortRemainder, *, has_readers: bool) -> Alone | None:
    if writer.role is WorkerRole.COLOCATED:
        return Alone.COLOCATED
    if not has_readers:
        return Alone.NO_PREFILL_WORKER
    return Alone.SHORT_REMAINDER if short(view, writer) else None


def _nearest(best: Score, near: Sequence[Score], handing: Mapping[str, float], slack: float) -> Score:
    """Of readers with their ways to one writer the cheapest; the best reader unless another is better by `slack`."""
    found = min(near, key=lambda one: one.total + handing[one.worker_id])
    if best.worker_id not in handing:
        return best
    gain = best.total + handing[best.worker_id] - found.total - handing[found.worker_id]
    return found if gain > slack else best
