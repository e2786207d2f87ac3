"""The state of workers as columns, so that a few array operations weigh a thousand workers.

    WorkerSet        ids and roles: the same object from request to request
    CandidateTable   a row of `values` for every number of a `Candidate`, a column for every worker

Arrays are float64, [workers]; whole numbers stay exact in them. Formulas only add, multiply and compare: their results
are the same on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.codec import Value
from protos.values import WorkerRole

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Places = NDArray[np.intp]
Columns = Places | slice

FEW = 8
"""Up to this many workers are weighed one by one, with the same formulas: a numpy call costs as much for one number as
for hundreds."""

Numbers = TypeVar("Numbers", float, Floats)
"""The number of one worker, or the array of all workers."""


def where(condition: Any, chosen: Numbers, other: Numbers | float) -> Numbers:
    if isinstance(condition, np.ndarray):
        return np.where(condition, chosen, other)  # type: ignore[return-value]  # arrays, then
    return chosen if condition else other  # type: ignore[return-value]  # floats


class Line(Value, frozen=True, kw_only=True):
    """The seconds that an amount of work takes: `fixed_s`, plus `each_s` per unit."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    def __call__(self, amount: float) -> float:
        return self.fixed_s + self.each_s * amount


UNKNOWN = Line()


class LineNumbers(Protocol[Numbers]):
    @property
    def each_s(self) -> Numbers: ...
    def __call__(self, amount: Numbers, /) -> Numbers: ...


class WorkerNumbers(Protocol[Numbers]):
    """The numbers that cost formulas read, from a `Candidate` or a `CandidateTable`."""

    @property
    def num_cached_tokens(self) -> Numbers: ...
    @property
    def num_host_tokens(self) -> Numbers: ...
    @property
    def num_requests(self) -> Numbers: ...
    @property
    def queued_prefill_tokens(self) -> Numbers: ...
    @property
    def prefill_time(self) -> LineNumbers[Numbers]: ...
    @property
    def load_time(self) -> LineNumbers[Numbers]: ...
    @property
    def step_time(self) -> LineNumbers[Numbers]: ...


class Lines:
    __slots__ = ("each_s", "fixed_s")

    def __init__(self, fixed_s: Floats, each_s: Floats) -> None:
        self.fixed_s = fixed_s
        self.each_s = each_s

    def __call__(self, amount: Floats) -> Floats:
        return self.fixed_s + self.each_s * amount


class LoadRow(NamedTuple):
    """A worker's load, and the work routed to it that its load does not include yet."""

    num_requests: float
    num_waiting: float
    queued_prefill_tokens: float
    num_free_blocks: float
    num_blocks: float
    prefill_tokens_per_s: float
    decode_step_s: float


class Candidate(Value, frozen=True, kw_only=True):
    """A worker that accepts new work: one column of a `CandidateTable`.

    `num_cached_tokens` of this request are in its cache, always fewer than the request has. Of these, `num_host_tokens`
    are only in host memory and must be loaded. `num_waiting` of its `num_requests` have not begun.
    `prefill_tokens_per_s` and `decode_step_s` are the worker's latest measurements, 0 before the first.

    The predictor (`router.routing.predictor`) fills in the rest: seconds to a first token by the tokens to be computed
    before it (`prefill_time`), seconds to load tokens from the host (`load_time`), seconds between tokens by the
    sequences that it decodes at a time (`step_time`), and seconds that an answer waits for its KV, by its bytes, over
    an unmeasured lane (`transfer_time`). `recent_tokens` is the worker's recent prefill work in tokens; older work
    counts less.
    """

    worker_id: str
    role: WorkerRole
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_time: Line = UNKNOWN
    load_time: Line = UNKNOWN
    step_time: Line = UNKNOWN
    transfer_time: Line = UNKNOWN
    recent_tokens: float = 0.0


_COUNTS = ("num_cached_tokens", "num_host_tokens", *LoadRow._fields[:5])
NUMBERS = (*_COUNTS, *LoadRow._fields[5:], "recent_tokens")
LINES = ("prefill_time", "load_time", "step_time", "transfer_time")
ROWS = {name: row for row, name in enumerate(NUMBERS)} | {
    name: len(NUMBERS) + 2 * number for number, name in enumerate(LINES)
}
"""The row of each number in a table. A line has two rows: its fixed part, then its part per unit."""
NUM_ROWS = len(NUMBERS) + 2 * len(LINES)
LOAD_ROWS = slice(ROWS["num_requests"], ROWS["decode_step_s"] + 1)
PREDICTED_ROWS = slice(ROWS["recent_tokens"], NUM_ROWS)


class WorkerSet:
    def __init__(self, worker_ids: Iterable[str], roles: Iterable[WorkerRole]) -> None:
        self.worker_ids = tuple(worker_ids)
        self.roles = tuple(roles)

    def __len__(self) -> int:
        return len(self.worker_ids)

    @cached_property
    def places(self) -> Mapping[str, int]:
        return {worker_id: place for place, worker_id in enumerate(self.worker_ids)}

    @cached_property
    def prefill_pool(self) -> WorkerSubset:
        """The workers that compute prompts for decode workers. Empty while they stand in for the decode pool: each then
        serves whole requests."""
        return self._subset(lambda role: role is WorkerRole.PREFILL and not self.stands_in)

    @cached_property
    def decode_pool(self) -> WorkerSubset:
        return self._subset(lambda role: role is not WorkerRole.PREFILL or self.stands_in)

    @cached_property
    def stands_in(self) -> bool:
        return all(role is WorkerRole.PREFILL for role in self.roles)

    @cached_property
    def colocated(self) -> Bools:
        return np.array([role is WorkerRole.COLOCATED for role in self.roles], dtype=np.bool_)

    @cached_property
    def role_numbers(self) -> tuple[Sequence[WorkerRole], Places]:
        roles = tuple(dict.fromkeys(self.roles))
        return roles, np.array([roles.index(role) for role in self.roles], dtype=np.intp)

    def take(self, places: Iterable[int]) -> WorkerSet:
        chosen = tuple(places)
        return WorkerSet((self.worker_ids[place] for place in chosen), (self.roles[place] for place in chosen))

    def _subset(self, belongs: Callable[[WorkerRole], bool]) -> WorkerSubset:
        places = [place for place, role in enumerate(self.roles) if belongs(role)]
        return WorkerSubset(self if len(places) == len(self) else self.take(places), columns_of(places))


class WorkerSubset(NamedTuple):
    """Some workers, and their columns in a larger table."""

    workers: WorkerSet
    columns: Columns


def columns_of(places: Sequence[int]) -> Columns:
    if places and places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return np.array(places, dtype=np.intp)


class LaneLatencies(Mapping[str, Line]):
    """The measured lanes of one prefill worker, by decode worker. They are cached as arrays for the workers used
    last."""

    __slots__ = ("_lines", "_measured", "_workers")

    def __init__(self, measured: Mapping[str, Line] | None = None) -> None:
        self._measured = dict(measured or {})
        self._workers: WorkerSet | None = None
        self._lines = Lines(np.empty(0), np.empty(0))

    def __getitem__(self, decode: str) -> Line:
        return self._measured[decode]

    def __iter__(self) -> Iterator[str]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)

    def set(self, decode: str, line: Line) -> None:
        self._measured[decode] = line
        if self._workers is not None and (place := self._workers.places.get(decode)) is not None:
            self._lines.fixed_s[place], self._lines.each_s[place] = line.fixed_s, line.each_s

    def drop(self, decode: str) -> None:
        if self._measured.pop(decode, None) is not None:
            self._workers = None

    def lines(self, workers: WorkerSet) -> Lines:
        if workers is not self._workers:
            lines = [self._measured.get(worker_id, _UNMEASURED) for worker_id in workers.worker_ids]
            self._lines = Lines(np.array([line.fixed_s for line in lines]), np.array([line.each_s for line in lines]))
            self._workers = workers
        return self._lines


_UNMEASURED = Line(fixed_s=np.nan, each_s=np.nan)


class _Column:
    def __set_name__(self, owner: type, name: str) -> None:
        self._row = ROWS[name]

    def __get__(self, table: CandidateTable, owner: type) -> Floats:
        column: Floats = table.values[self._row]
        return column


class _LineColumns:
    def __set_name__(self, owner: type, name: str) -> None:
        self._row = ROWS[name]

    def __get__(self, table: CandidateTable, owner: type) -> Lines:
        return Lines(table.values[self._row], table.values[self._row + 1])


class CandidateTable:
    """The state of the workers that accept new work. A policy's table does not change after it was built."""

    __slots__ = ("values", "workers")

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
    prefill_time = _LineColumns()
    load_time = _LineColumns()
    step_time = _LineColumns()
    transfer_time = _LineColumns()

    def __init__(self, workers: WorkerSet, values: Floats) -> None:
        self.workers = workers
        self.values = values

    @property
    def lines(self) -> Floats:
        return self.values[len(NUMBERS) :]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> CandidateTable:
        values = np.empty((NUM_ROWS, len(candidates)))
        for place, candidate in enumerate(candidates):
            lines = [getattr(candidate, name) for name in LINES]
            parts = [part for line in lines for part in (line.fixed_s, line.each_s)]
            values[:, place] = [*(getattr(candidate, name) for name in NUMBERS), *parts]
        return cls(WorkerSet([c.worker_id for c in candidates], [c.role for c in candidates]), values)

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Candidate:
        column = self.values[:, place].tolist()
        numbers: dict[str, Any] = dict(zip(NUMBERS, column, strict=False))
        numbers.update(zip(_COUNTS, map(int, column), strict=False))
        for name in LINES:
            row = ROWS[name]
            numbers[name] = Line(fixed_s=column[row], each_s=column[row + 1])
        return Candidate(worker_id=self.workers.worker_ids[place], role=self.workers.roles[place], **numbers)

    def candidate(self, worker_id: str) -> Candidate:
        return self[self.workers.places[worker_id]]

    def pair(self, prefill_id: str | None, decode_id: str) -> tuple[Candidate, Candidate]:
        decode = self.candidate(decode_id)
        return (self.candidate(prefill_id) if prefill_id is not None else decode), decode

    def load_rows(self) -> Sequence[LoadRow]:
        return [LoadRow(*row) for row in self.values[LOAD_ROWS].T.tolist()]

    @property
    def most_cached(self) -> int:
        return int(np.maximum.reduce(self.num_cached_tokens))

    @property
    def caching(self) -> Sequence[str]:
        return [self.workers.worker_ids[place] for place in self.num_cached_tokens.nonzero()[0].tolist()]

    def only(self, worker_id: str) -> CandidateTable:
        place = self.workers.places[worker_id]
        return CandidateTable(WorkerSet((worker_id,), (self.workers.roles[place],)), self.values[:, place : place + 1])

    def take(self, places: Sequence[int] | Places) -> CandidateTable:
        return CandidateTable(self.workers.take(places), self.values[:, places])

    def besides(self, worker_ids: Collection[str]) -> CandidateTable:
        others = [place for place, worker_id in enumerate(self.workers.worker_ids) if worker_id not in worker_ids]
        return self.take(others) if others and len(others) < len(self) else self

    @property
    def prefill_pool(self) -> CandidateTable:
        return self._subset(self.workers.prefill_pool)

    @property
    def decode_pool(self) -> CandidateTable:
        return self._subset(self.workers.decode_pool)

    @property
    def prompt_pool(self) -> CandidateTable:
        return self.prefill_pool if len(self.workers.prefill_pool.workers) else self

    def _subset(self, subset: WorkerSubset) -> CandidateTable:
        workers, columns = subset
        return self if workers is self.workers else CandidateTable(workers, self.values[:, columns])
