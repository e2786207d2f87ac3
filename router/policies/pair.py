"""The joint choice of who reads a prompt and who writes its answer.

    for each decode worker d:   cost(d) = writing(d) + reading by d itself                            if d works alone
                                          writing(d) + reading by p + KV from p to d, the best p      else

Where nobody decodes, the prefill workers stand in: each is a d that works alone.

d works alone when it serves both halves anyway, when there is no prefill worker, or when so little of the prompt is
missing on it that handing KV over would not pay (conditional disaggregation): where seconds are compared, unless it
would by them. Or whoever lacks more of a prompt would be offered a reader, and would be preferred for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from protos.values import WorkerRole
from router.policies.base import Alone, Candidate, Decision, Policy, RequestView, Score
from router.policies.table import Candidates, Floats, Known, Places, Rank, Scores, Ways, cheapest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRemainder:
    """A remainder is short below both bounds: tokens, and share of all the request's tokens."""

    max_tokens: int
    max_share: float

    def __call__(self, view: RequestView, writer: Known) -> Any:
        """Of one, or of each."""
        missing = view.num_tokens - writer.num_cached_tokens
        return (missing < self.max_tokens) & (missing < self.max_share * view.num_tokens)


Between = Callable[[RequestView, Sequence[str], Candidates], Floats]
"""[readers, writers]: the cost of handing KV over from each of some readers to each of the writers."""

NEAR_READERS = 8  # that may win by a better lane; those behind them would have to be better by far
NEVER = 1e15
"""What reading costs whom a rank has left out: more than anything else."""
MAX_TOLD = 16
"""Scores of a pool that a decision tells of: the lowest, and the chosen one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Who reads for each writer: one of `readers`, by its place, or with -1 the writer itself. `cost` is the reading's;
    `transfer` the hand-over's, NaN where there is none."""

    readers: Scores | None
    place: Places
    cost: Floats
    transfer: Floats | None = None


def pair(
    name: str, *, read: Rank, write: Rank, short: ShortRemainder, between: Between | None = None, tolerance: float = 0.0
) -> Policy:
    """A policy called `name`, from a rank of readers and a rank of writers whose costs can be added up. Costs that
    differ by less than the share `tolerance` of them are equal."""

    def decide(view: RequestView, candidates: Sequence[Candidate]) -> Decision:
        offered = Candidates.of(candidates)
        return _only(view, offered) or weighed(view, offered)

    def _only(view: RequestView, offered: Candidates) -> Decision | None:
        """Where there is no choice there is nothing to weigh, until somebody asks for the scores."""
        readers, writers = offered.readers, offered.writers
        if len(writers) != 1 or len(readers) > 1:
            return None
        [worker_id], [role] = writers.crew.worker_ids, writers.crew.roles
        lanes = {
            reader: Ways({worker_id: line})
            for reader in readers.crew.worker_ids
            if (ways := view.lanes.get(reader)) is not None and (line := ways.get(worker_id)) is not None
        }
        is_bound = role is WorkerRole.COLOCATED or not len(readers)
        alone = is_bound or bool(short(view, writers[0]))
        if alone and not is_bound and between is not None:
            return None  # it would be handed over if that took less
        return Decision(
            policy=name,
            prefill=None if alone else readers.crew.worker_ids[0],
            decode=worker_id,
            alone=_why(role, has_readers=bool(len(readers))) if alone else None,
            scores=Later(lambda: weighed(replace(view, lanes=lanes), offered).scores),  # the view's go on changing
        )

    def weighed(view: RequestView, offered: Candidates) -> Decision:
        readers, writers = offered.readers, offered.writers
        assert len(writers), "the dispatcher waits until there is a worker"
        reading = read(view, readers) if len(readers) else None
        writing = write(view, writers)
        if writing.crew is not writers.crew:
            writers = writers.take(writing.places)
        if reading is None:
            alone = np.ones(len(writers), dtype=np.bool_)
            chosen = _all_alone(_spread(read(view, writers), len(writers)))
        else:
            colocated, is_short = writers.crew.colocated, short(view, writers)
            alone = colocated | is_short
            chosen = _handed_over(view, reading, readers, writers, between, tolerance)
            if alone.any():
                own = read(view, writers)
                if chosen.transfer is not None:
                    handed = _unsteered(reading)[chosen.place] + chosen.transfer
                    soon = _spread(own, len(writers), _unsteered(own)) <= (1 + tolerance) * handed
                    alone = colocated | is_short & soon
                chosen = _or_alone(chosen, alone, _spread(own, len(writers)))
        costs = writing.totals if chosen.transfer is None else writing.totals + _or_none(chosen.transfer)
        totals = costs + chosen.cost
        place = cheapest(_evened(totals, chosen.cost, tolerance), view, among=writers if tolerance else None)
        reader = int(chosen.place[place])
        return Decision(
            policy=name,
            prefill=reading.crew.worker_ids[reader] if reading is not None and reader >= 0 else None,
            decode=writers.crew.worker_ids[place],
            alone=_why(writers.crew.roles[place], has_readers=reading is not None) if alone[place] else None,
            scores=Later(lambda: _told(writing, totals, chosen, place)),
        )

    return decide


def _handed_over(
    view: RequestView,
    reading: Scores,
    readers: Candidates,
    writers: Candidates,
    between: Between | None,
    tolerance: float,
) -> _Reading:
    """For each writer the cheapest of the near readers with their ways to it; the best reader unless another is better
    by what counts as equal."""
    count = len(writers)
    slack = tolerance * float(reading.totals.min())
    best = cheapest(reading.totals, view, slack=slack, among=_ranked(reading, readers) if tolerance else None)
    if between is None:
        return _Reading(readers=reading, place=np.full(count, best), cost=np.full(count, reading.totals[best]))
    near = reading.cheapest(NEAR_READERS)
    worker_ids, readings = reading.crew.worker_ids, reading.totals[near]
    handing = between(view, [worker_ids[place] for place in near], writers)
    if best not in near:
        [own] = between(view, [worker_ids[best]], writers)
        return _Reading(
            readers=reading, place=np.full(count, best), cost=np.full(count, reading.totals[best]), transfer=own
        )
    found = (readings[:, None] + handing).argmin(axis=0)
    columns, first = np.arange(count), int(np.flatnonzero(near == best)[0])
    gain = readings[first] + handing[first] - readings[found] - handing[found, columns]
    rows = np.where(gain > slack, found, first)
    return _Reading(readers=reading, place=near[rows], cost=readings[rows], transfer=handing[rows, columns])


def _ranked(scores: Scores, candidates: Candidates) -> Candidates:
    """Those that a rank has not left out."""
    return candidates if len(scores) == len(candidates) else candidates.take(scores.places)


def _all_alone(own: Floats) -> _Reading:
    """`own` is what reading costs each."""
    return _Reading(readers=None, place=np.full(len(own), -1), cost=own)


def _or_alone(chosen: _Reading, alone: NDArray[np.bool_], own: Floats) -> _Reading:
    """With those reading themselves who work alone."""
    return _Reading(
        readers=chosen.readers,
        place=np.where(alone, -1, chosen.place),
        cost=np.where(alone, own, chosen.cost),
        transfer=None if chosen.transfer is None else np.where(alone, np.nan, chosen.transfer),
    )


def _spread(own: Scores, count: int, costs: Floats | None = None) -> Floats:
    """Whom the rank has left out reads nothing."""
    cost = np.full(count, NEVER)
    cost[own.places] = own.totals if costs is None else costs
    return cost


def _unsteered(scores: Scores) -> Floats:
    """Without what keeps a pool even: that says nothing about which of two pools should read."""
    return scores.totals - dict(scores.terms).get("imbalance", 0.0)


def _or_none(transfer: Floats) -> Floats:
    """Of those who work alone there is none."""
    return np.where(np.isnan(transfer), 0.0, transfer)


def _evened(totals: Floats, reading: Floats, tolerance: float) -> Floats:
    """Without what differs less than `tolerance` in reading, or in writing: an answer of seconds that all would write
    alike must not hide which of them reads the prompt soonest."""
    writing = totals - reading
    least_read, least_write = (1 + tolerance) * reading.min(), (1 + tolerance) * writing.min()
    evened: Floats = np.maximum(reading, least_read) + np.maximum(writing, least_write)
    return evened


def _why(role: WorkerRole, *, has_readers: bool) -> Alone:
    if role is WorkerRole.COLOCATED:
        return Alone.COLOCATED
    if role is WorkerRole.PREFILL:
        return Alone.STANDS_IN
    return Alone.SHORT_REMAINDER if has_readers else Alone.NO_PREFILL_WORKER


# -- what is told of a decision ----------------------------------------------------------------------------------------


class Later(Sequence[Score]):
    """Scores that are worked out for whoever asks for them first."""

    __slots__ = ("_found", "_make")

    def __init__(self, make: Callable[[], Sequence[Score]]) -> None:
        self._make: Callable[[], Sequence[Score]] | None = make
        self._found: Sequence[Score] = ()

    def now(self) -> Sequence[Score]:
        if self._make is not None:
            self._found, self._make = self._make(), None
        return self._found

    def __len__(self) -> int:
        return len(self.now())

    @overload
    def __getitem__(self, place: int) -> Score: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Score]: ...
    def __getitem__(self, place: int | slice) -> Score | Sequence[Score]:
        return self.now()[place]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class Costs(Sequence[Score]):
    """Of a decision: what reading costs, then what writing costs with it, each by whom it names."""

    __slots__ = ("_by", "_reading", "_whole")

    def __init__(self, reading: Scores | None, whole: Scores, by: Sequence[str]) -> None:
        self._reading = reading
        self._whole = whole
        self._by = by

    @property
    def worker_ids(self) -> Sequence[str]:
        return (*(() if self._reading is None else self._reading.crew.worker_ids), *self._whole.crew.worker_ids)

    def __len__(self) -> int:
        return (0 if self._reading is None else len(self._reading)) + len(self._whole)

    @overload
    def __getitem__(self, place: int) -> Score: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Score]: ...
    def __getitem__(self, place: int | slice) -> Score | Sequence[Score]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        number = range(len(self))[place]
        before = len(self) - len(self._whole)
        if self._reading is not None and number < before:
            return self._reading[number]
        scored = self._whole[number - before]
        *terms, (_, reading) = scored.terms
        terms.append((f"reading by {self._by[number - before]}", reading))
        return Score(worker_id=scored.worker_id, role=scored.role, total=scored.total, terms=tuple(terms))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _told(writing: Scores, totals: Floats, chosen: _Reading, place: int) -> Costs:
    more = [] if chosen.transfer is None else [("transfer", chosen.transfer)]
    whole = Scores(writing.crew, totals, (*writing.terms, *more, ("reading", chosen.cost)), writing.places)
    kept = _lowest(whole, place)
    readers, reader = chosen.readers, int(chosen.place[place])
    worker_ids = [] if readers is None else readers.crew.worker_ids
    by = [
        worker_ids[number] if number >= 0 else writing.crew.worker_ids[at]
        for at, number in zip(kept, chosen.place[kept].tolist(), strict=True)
    ]
    return Costs(None if readers is None else readers.take(_lowest(readers, reader)), whole.take(kept), by)


def _lowest(scores: Scores, chosen: int) -> Sequence[int]:
    """In their order: all of them, or the lowest with the chosen."""
    count = len(scores)
    if count <= MAX_TOLD:
        return range(count)
    lowest = set(scores.cheapest(MAX_TOLD).tolist())
    return sorted(lowest | {chosen} if chosen >= 0 else lowest)


def told(candidates: Candidates, decision: Decision) -> Candidates:
    """Those that are of interest afterwards: all of few; of many those whose scores the decision tells, and whoever
    might have read the prompt and had most of it."""
    if len(candidates) <= 2 * MAX_TOLD:
        return candidates
    places = candidates.crew.places
    reader = places[decision.prefill or decision.decode]
    rivals = candidates.num_cached_tokens.copy()
    rivals[reader] = -1
    role = candidates.crew.roles[reader]
    crew = candidates.crew
    pool = (crew.readers if role is WorkerRole.PREFILL and not crew.stands_in else crew.writers).places
    costs = decision.scores.now() if isinstance(decision.scores, Later) else decision.scores
    named = costs.worker_ids if isinstance(costs, Costs) else [one.worker_id for one in costs]
    kept = {*(places[worker_id] for worker_id in named), reader, places[decision.decode]}
    kept.add(int(pool[rivals[pool].argmax()]))
    return candidates.take(sorted(kept))
