"""Candidates and their scores as columns, so that a thousand workers are weighed in a few operations on arrays.

    Crew        who they are: the same from request to request, worked out once
    Candidates  what is known of each: a row of `table` for every number that a `Candidate` has
    Scores      what each would cost, term by term

A column has the name that the number has in a `Candidate`: a formula over one of them serves all. Arrays are float64,
[workers]; whole numbers stay exact in them. Added up, multiplied and compared only: the same on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from protos.values import WorkerRole
from router.policies.base import Candidate, Line, RequestView, Score

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
Columns = Places | slice

NUMBERS = (
    "num_cached_tokens", "num_host_tokens", "num_requests", "num_waiting", "queued_prefill_tokens", "num_free_blocks",
    "num_blocks",
)  # fmt: skip
AMOUNTS = ("prefill_tokens_per_s", "decode_step_s", "recent_tokens")
LINES = ("reading", "loading", "stepping", "receiving")
_SINGLE = (*NUMBERS, *AMOUNTS)
ROWS = {name: row for row, name in enumerate(_SINGLE)} | {
    name: len(_SINGLE) + 2 * number for number, name in enumerate(LINES)
}
"""Where a number stands in a table; of a line it is the fixed part, and what each unit takes stands below it."""
NUM_ROWS = len(_SINGLE) + 2 * len(LINES)
Row = Sequence[float]
"""Of one worker, a number for each row of a table."""


class Figures(NamedTuple):
    """A worker's load, as it stands in a row from `num_requests` on."""

    num_requests: float
    num_waiting: float
    queued_prefill_tokens: float
    num_free_blocks: float
    num_blocks: float
    prefill_tokens_per_s: float
    decode_step_s: float


_FIGURES = slice(ROWS["num_requests"], ROWS["decode_step_s"] + 1)
assert tuple(ROWS)[_FIGURES] == Figures._fields


class Crew:
    """Some workers, in an order that lasts."""

    def __init__(self, worker_ids: Sequence[str], roles: Sequence[WorkerRole]) -> None:
        self.worker_ids = tuple(worker_ids)
        self.roles = tuple(roles)

    def __len__(self) -> int:
        return len(self.worker_ids)

    @cached_property
    def places(self) -> dict[str, int]:
        return {worker_id: place for place, worker_id in enumerate(self.worker_ids)}

    @cached_property
    def readers(self) -> Pool:
        """The prefill pool. Empty while it stands in for the decode pool: then each of its workers serves whole
        requests."""
        return self._pool(lambda role: role is WorkerRole.PREFILL and not self.stands_in)

    @cached_property
    def writers(self) -> Pool:
        """Those that decode: while no other worker is here, the prefill pool."""
        return self._pool(lambda role: role is not WorkerRole.PREFILL or self.stands_in)

    @cached_property
    def stands_in(self) -> bool:
        """Does the prefill pool do the decode pool's work?"""
        return all(role is WorkerRole.PREFILL for role in self.roles)

    @cached_property
    def colocated(self) -> NDArray[np.bool_]:
        return np.array([role is WorkerRole.COLOCATED for role in self.roles], dtype=np.bool_)

    def take(self, places: Sequence[int] | Places) -> Crew:
        return Crew([self.worker_ids[place] for place in places], [self.roles[place] for place in places])

    def _pool(self, belongs: Callable[[WorkerRole], bool]) -> Pool:
        places = [place for place, role in enumerate(self.roles) if belongs(role)]
        crew = self if len(places) == len(self) else self.take(places)
        return Pool(crew, np.array(places, dtype=np.intp), columns(places))


class Pool(NamedTuple):
    """Some of a crew: who they are, where they stand among it, and the columns that a table of it has for them."""

    crew: Crew
    places: Places
    columns: Columns


def columns(places: Sequence[int]) -> Columns:
    """Of places that ascend: a slice, which needs no copy, where they have no gap, as a pool's have none."""
    if places and places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return np.array(places, dtype=np.intp)


FEW = 8
"""Workers up to which a row of numbers each is cheaper than an array of each number."""


class Lines:
    """A `Line` of each worker."""

    __slots__ = ("each_s", "fixed_s")

    def __init__(self, fixed_s: Floats, each_s: Floats) -> None:
        self.fixed_s = fixed_s
        self.each_s = each_s

    def __call__(self, amount: Any) -> Floats:
        seconds: Floats = self.fixed_s + self.each_s * amount
        return seconds


class Ways(Mapping[str, Line]):
    """From one reader to the writers for which they were measured. Of a crew that is asked for again and again the
    lines are kept as arrays."""

    __slots__ = ("_crew", "_known", "_lines")

    def __init__(self, known: Mapping[str, Line] | None = None) -> None:
        self._known = dict(known or {})
        self._crew: Crew | None = None
        self._lines = Lines(np.empty(0), np.empty(0))

    def __getitem__(self, writer: str) -> Line:
        return self._known[writer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def set(self, writer: str, line: Line) -> None:
        self._known[writer] = line
        if self._crew is not None and (place := self._crew.places.get(writer)) is not None:
            self._lines.fixed_s[place], self._lines.each_s[place] = line.fixed_s, line.each_s

    def forget(self, writer: str) -> None:
        """One that was not measured is fine."""
        if self._known.pop(writer, None) is not None:
            self._crew = None

    def lines(self, crew: Crew) -> Lines:
        """NaN for those that were not measured."""
        if crew is self._crew:
            return self._lines
        known = [self._known.get(worker_id) for worker_id in crew.worker_ids]
        lines = Lines(
            np.array([np.nan if line is None else line.fixed_s for line in known]),
            np.array([np.nan if line is None else line.each_s for line in known]),
        )
        if len(crew) > FEW:
            self._crew, self._lines = crew, lines
        return lines


class _Column:
    """Of one number."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._row = ROWS[name]

    def __get__(self, candidates: Candidates, owner: type) -> Floats:
        column: Floats = candidates.table[self._row]
        return column


class _Lines:
    """Of one line."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._row = ROWS[name]

    def __get__(self, candidates: Candidates, owner: type) -> Lines:
        return Lines(candidates.table[self._row], candidates.table[self._row + 1])


class Candidates(Sequence[Candidate]):
    """Of one request, which must not change any more. A `Candidate` is made of each that is asked for, once.

    Made of a `table`, or, where they are few, of `rows`: the numbers of each in the order of `ROWS`. What is asked of
    the other form is made when it is.
    """

    __slots__ = ("_made", "_rows", "_table", "crew")

    num_cached_tokens = _Column()
    num_host_tokens = _Column()
    num_requests = _Column()
    num_waiting = _Column()
    queued_prefill_tokens = _Column()
    num_free_blocks = _Column()
    num_blocks = _Column()
    prefill_tokens_per_s = _Column()
    decode_step_s = _Column()
    recent_tokens = _Column()
    reading = _Lines()
    loading = _Lines()
    stepping = _Lines()
    receiving = _Lines()

    def __init__(self, crew: Crew, table: Floats | None = None, rows: Sequence[Row] | None = None) -> None:
        assert table is not None or rows is not None
        self.crew = crew
        self._table = table
        self._rows = rows
        self._made: dict[int, Candidate] = {}

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Candidates:
        if isinstance(candidates, Candidates):
            return candidates
        crew = Crew([one.worker_id for one in candidates], [one.role for one in candidates])
        return cls(crew, rows=[row_of(one) for one in candidates])

    def __len__(self) -> int:
        return len(self.crew)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> Candidates: ...
    def __getitem__(self, place: int | slice) -> Candidate | Candidates:
        if isinstance(place, slice):
            return self.take(range(len(self))[place])
        if (made := self._made.get(place)) is None:
            made = self._made[place] = self._make(range(len(self))[place])
        return made

    def _make(self, place: int) -> Candidate:
        row = self._rows[place] if self._rows is not None else self.table[:, place].tolist()
        num_cached, num_host, num_requests, num_waiting, num_queued, num_free, num_blocks = map(int, row[:7])
        speed, step_s, recent, *lines = row[7:]
        reading, loading, stepping, receiving = [
            Line(fixed_s=lines[at], each_s=lines[at + 1]) for at in range(0, len(lines), 2)
        ]
        return Candidate(
            worker_id=self.crew.worker_ids[place],
            role=self.crew.roles[place],
            num_cached_tokens=num_cached,
            num_host_tokens=num_host,
            num_requests=num_requests,
            num_waiting=num_waiting,
            queued_prefill_tokens=num_queued,
            num_free_blocks=num_free,
            num_blocks=num_blocks,
            prefill_tokens_per_s=speed,
            decode_step_s=step_s,
            reading=reading,
            loading=loading,
            stepping=stepping,
            receiving=receiving,
            recent_tokens=recent,
        )

    @property
    def table(self) -> Floats:
        """A row for each number, a column for each worker."""
        if self._table is None:
            columns = np.array(self._rows, dtype=np.float64).reshape(-1, NUM_ROWS).T
            self._table = np.ascontiguousarray(columns)
        return self._table

    @property
    def rows(self) -> Sequence[Row]:
        """The numbers of each worker."""
        if self._rows is None:
            self._rows = self.table.T.tolist()
        return self._rows

    @property
    def most_cached(self) -> int:
        """Tokens that somebody has cached."""
        if self._rows is None:
            return int(self.num_cached_tokens.max())
        return int(max(row[0] for row in self._rows))

    def having(self) -> Sequence[int]:
        """The places of those that have anything of the request cached."""
        if self._rows is None:
            found: list[int] = np.flatnonzero(self.num_cached_tokens).tolist()
            return found
        return [place for place, row in enumerate(self._rows) if row[0]]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def named(self, worker_id: str) -> Candidate:
        return self[self.crew.places[worker_id]]

    def take(self, places: Sequence[int] | Places) -> Candidates:
        return self._of(self.crew.take(places), places, places)

    def besides(self, worker_ids: Collection[str]) -> Candidates:
        """Those left without some; all if none is left."""
        kept = [place for place, worker_id in enumerate(self.crew.worker_ids) if worker_id not in worker_ids]
        return self.take(kept) if kept and len(kept) < len(self) else self

    @property
    def readers(self) -> Candidates:
        return self._pool(self.crew.readers)

    @property
    def writers(self) -> Candidates:
        return self._pool(self.crew.writers)

    def _pool(self, pool: Pool) -> Candidates:
        return self if pool.crew is self.crew else self._of(*pool)

    def _of(self, crew: Crew, places: Sequence[int] | Places, columns: Sequence[int] | Columns) -> Candidates:
        if self._rows is not None:
            return Candidates(crew, rows=[self._rows[place] for place in places])
        return Candidates(crew, self.table[:, columns])


Known = Candidate | Candidates
"""What a formula may be about: one of them, or all; it gives a number, or an array of them."""


def row_of(candidate: Candidate) -> Row:
    values: list[float] = [getattr(candidate, name) for name in (*NUMBERS, *AMOUNTS)]
    for name in LINES:
        line = getattr(candidate, name)
        values += (line.fixed_s, line.each_s)
    return values


def readers_of(candidates: Candidates) -> Candidates:
    """Those that read prompts: the prefill pool if there is one."""
    readers = candidates.readers
    return readers if len(readers) else candidates


def figures_of(candidates: Candidates) -> Iterator[Figures]:
    return (Figures._make(row[_FIGURES]) for row in candidates.rows)


def named(candidates: Sequence[Candidate], worker_id: str) -> Candidate:
    """The candidate of that worker, one of them."""
    if isinstance(candidates, Candidates):
        return candidates.named(worker_id)
    return next(one for one in candidates if one.worker_id == worker_id)


class Scores(Sequence[Score]):
    """Of the candidates at `places`: a `Score` is made of each that is asked for. Terms that only some of them have
    are NaN for the others."""

    __slots__ = ("crew", "places", "terms", "totals")

    def __init__(self, crew: Crew, totals: Floats, terms: Sequence[tuple[str, Floats]], places: Places) -> None:
        self.crew = crew
        self.totals = totals
        self.terms = tuple(terms)
        self.places = places

    def __len__(self) -> int:
        return len(self.totals)

    @overload
    def __getitem__(self, place: int) -> Score: ...
    @overload
    def __getitem__(self, place: slice) -> Scores: ...
    def __getitem__(self, place: int | slice) -> Score | Scores:
        if isinstance(place, slice):
            return self.take(range(len(self))[place])
        terms = [(name, float(cost[place])) for name, cost in self.terms]
        return Score(
            worker_id=self.crew.worker_ids[place],
            role=self.crew.roles[place],
            total=float(self.totals[place]),
            terms=tuple((name, cost) for name, cost in terms if cost == cost),
        )

    def take(self, places: Sequence[int] | Places) -> Scores:
        places = np.asarray(places, dtype=np.intp)  # once: each term would do it otherwise
        terms = [(name, cost[places]) for name, cost in self.terms]
        return Scores(self.crew.take(places), self.totals[places], terms, self.places[places])

    def plus(self, **terms: Floats) -> Scores:
        """With further costs."""
        totals = reduce(add, terms.values(), self.totals)
        return Scores(self.crew, totals, (*self.terms, *terms.items()), self.places)

    def at(self, places: Sequence[int]) -> Scores:
        """The same of candidates that stand there."""
        return Scores(self.crew, self.totals, self.terms, np.array(places, dtype=np.intp))

    def cheapest(self, count: int) -> Places:
        """So many of them, the first of equals first. Totals are numbers, or infinite."""
        totals = self.totals
        if count >= len(totals):
            return np.argsort(totals, kind="stable")
        lowest = np.flatnonzero(totals <= np.partition(totals, count - 1)[count - 1])
        assert len(lowest) >= count, "a total that is no number"
        return lowest[np.argsort(totals[lowest], kind="stable")][:count]


def scores(candidates: Candidates, **terms: Floats) -> Scores:
    """Sums of named costs."""
    return Scores(candidates.crew, reduce(add, terms.values()), tuple(terms.items()), np.arange(len(candidates)))


Rank = Callable[[RequestView, Candidates], Scores]
"""Scores the candidates of one pool; it may leave some out, never all of them."""


def cheapest(totals: Floats, view: RequestView, *, slack: float = 0.0, among: Candidates | None = None) -> int:
    """The place of the lowest. Equals, which exceed the lowest by no more than `slack`, take turns, so that an idle
    pool fills all of its caches. Of those that stand `among` candidates and have as many requests as one another it is
    the one that has most of this request cached: a conversation keeps its own."""
    equals = np.flatnonzero(totals <= totals.min() + slack)
    if among is not None and len(equals) > 1:
        requests, cached = among.num_requests[equals], among.num_cached_tokens[equals]
        if requests.min() == requests.max():
            equals = equals[cached == cached.max()]
    following = int(np.searchsorted(equals, view.num_decided % len(totals)))
    return int(equals[following % len(equals)])
