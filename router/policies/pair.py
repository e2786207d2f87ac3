"""The joint choice of who reads a prompt and who writes its answer.

    for each decode worker d:   cost(d) = writing(d) + reading by d itself               if d works alone
                                          writing(d) + reading by the best prefill p     else

d works alone when it serves both halves anyway, when there is no prefill worker, or when so little of the prompt is
missing on it that handing KV over would not pay (conditional disaggregation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def pair(name: str, *, read: Rank, write: Rank, short: ShortRemainder) -> Policy:
    """A policy called `name`, from a rank of readers and a rank of writers whose costs can be added up."""

    def decide(view: RequestView, candidates: Sequence[Candidate]) -> Decision:
        readers = [candidate for candidate in candidates if candidate.role is WorkerRole.PREFILL]
        writers = {candidate.worker_id: candidate for candidate in candidates if decodes(candidate)}
        assert writers, "the dispatcher waits until somebody can decode"
        reading = read(view, readers) if readers else ()
        reader = cheapest(reading, view) if reading else None
        whole: list[Score] = []
        reasons: dict[str, Alone | None] = {}
        for writing in write(view, list(writers.values())):
            writer = writers[writing.worker_id]
            alone = reasons[writer.worker_id] = _alone(view, writer, short, has_readers=reader is not None)
            by = read(view, [writer])[0] if alone or reader is None else reader
            whole.append(score(writer, **dict(writing.terms), **{f"reading by {by.worker_id}": by.total}))
        best = cheapest(whole, view)
        alone = reasons[best.worker_id]
        return Decision(
            policy=name,
            prefill=None if alone or reader is None else reader.worker_id,
            decode=best.worker_id,
            alone=alone,
            scores=(*reading, *whole),
        )

    return decide


def decodes(candidate: Candidate) -> bool:
    return candidate.role in (WorkerRole.DECODE, WorkerRole.COLOCATED)


def _alone(view: RequestView, writer: Candidate, short: ShortRemainder, *, has_readers: bool) -> Alone | None:
    if writer.role is WorkerRole.COLOCATED:
        return Alone.COLOCATED
    if not has_readers:
        return Alone.NO_PREFILL_WORKER
    return Alone.SHORT_REMAINDER if short(view, writer) else None
