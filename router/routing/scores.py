"""The costs of candidates, as columns: a rank scores one pool, and a decision keeps the scores of both pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import overload

import numpy as np

from router.routing.candidate_columns import CandidateTable, Floats, Places, WorkerSet
from router.routing.decision import RequestView, Score


class PoolScores:
    """The total costs of some workers, and their terms. A term is NaN for a worker to which it does not apply. A term
    has one name for all workers, or one for each."""

    __slots__ = ("terms", "totals", "workers")

    def __init__(self, workers: WorkerSet, totals: Floats, terms: Sequence[tuple[str | Sequence[str], Floats]]) -> None:
        self.workers = workers
        self.totals = totals
        self.terms = tuple(terms)

    def __len__(self) -> int:
        return len(self.totals)

    def score(self, place: int) -> Score:
        terms = [
            (name if isinstance(name, str) else name[place], float(cost[place]))
            for name, cost in self.terms
            if cost[place] == cost[place]
        ]
        return Score(
            worker_id=self.workers.worker_ids[place],
            role=self.workers.roles[place],
            total=float(self.totals[place]),
            terms=tuple(terms),
        )

    def take(self, places: Sequence[int]) -> PoolScores:
        columns = np.asarray(places, dtype=np.intp)
        terms = [(name, cost[columns]) for name, cost in self.terms]
        return PoolScores(self.workers.take(places), self.totals[columns], terms)

    def renamed(self, term: str, names: Sequence[str]) -> PoolScores:
        terms = [(names if name == term else name, cost) for name, cost in self.terms]
        return PoolScores(self.workers, self.totals, terms)

    def plus(self, **terms: Floats) -> PoolScores:
        return PoolScores(self.workers, reduce(add, terms.values(), self.totals), (*self.terms, *terms.items()))

    def cheapest(self, count: int) -> Places:
        totals = self.totals
        if count >= len(totals):
            return np.argsort(totals, kind="stable")
        lowest = np.flatnonzero(totals <= np.partition(totals, count - 1)[count - 1])
        assert len(lowest) >= count, "a total is NaN"
        return lowest[np.argsort(totals[lowest], kind="stable")][:count]


def pool_scores(candidates: CandidateTable, **terms: Floats) -> PoolScores:
    return PoolScores(candidates.workers, reduce(add, terms.values()), tuple(terms.items()))


Rank = Callable[[RequestView, CandidateTable], PoolScores]
"""A rank scores the candidates of one pool."""


class CostBreakdown(Sequence[Score]):
    """The scores of a decision, computed when they are first read: the prefill pool's, then the decode pool's."""

    def __init__(self, weigh: Callable[[], Sequence[PoolScores]]) -> None:
        self._weigh: Callable[[], Sequence[PoolScores]] | None = weigh
        self._parts: Sequence[PoolScores] = ()

    @property
    def parts(self) -> Sequence[PoolScores]:
        if self._weigh is not None:
            self._parts, self._weigh = self._weigh(), None
        return self._parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def __getitem__(self, place: int) -> Score: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Score]: ...
    def __getitem__(self, place: int | slice) -> Score | Sequence[Score]:
        return [part.score(number) for part in self.parts for number in range(len(part))][place]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def scored_workers(pool_scores: Sequence[Score]) -> Sequence[str]:
    if isinstance(pool_scores, CostBreakdown):
        return [worker_id for part in pool_scores.parts for worker_id in part.workers.worker_ids]
    return [score.worker_id for score in pool_scores]


def cheapest(totals: Floats, view: RequestView, *, slack: float = 0.0, among: CandidateTable | None = None) -> int:
    """The place of the lowest total. Candidates within `slack` of the lowest total count as equal and take turns, so
    that an idle pool fills all of its caches. If the equal ones among `among` all have the same number of requests,
    only those with most of this request cached take turns: a conversation keeps its worker."""
    equals = np.flatnonzero(totals <= totals.min() + slack)
    if len(equals) == 1:
        return int(equals[0])
    if among is not None:
        requests, cached = among.num_requests[equals], among.num_cached_tokens[equals]
        if requests.min() == requests.max():
            equals = equals[cached == cached.max()]
    turn = int(np.searchsorted(equals, view.num_decided % len(totals)))
    return int(equals[turn % len(equals)])
