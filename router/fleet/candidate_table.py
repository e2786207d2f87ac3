"""The fleet's workers as columns, kept up to date as they change, from which candidates are cut for each request; few
workers as rows.

A member says when anything about it changes, and the predictor of whom something was observed: only their columns are
worked out anew. What depends on the request (what is cached of it) and on the moment is put in for all of them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from protos.values import WorkerRole
from router.fleet.worker import Member
from router.latency.predictor import LOADING, READING, RECEIVING, STEPPING, Predictor
from router.latency.worker_features import NOTHING_KNOWN, Standing
from router.policies.base import Line
from router.policies.table import (
    FEW,
    LINES,
    NUM_ROWS,
    ROWS,
    Candidates,
    Columns,
    Crew,
    Figures,
    Floats,
    Row,
    columns,
)
from router.prefix.index import Match

_UNKNOWN: tuple[tuple[str, Line], ...] = (
    ("reading", READING), ("loading", LOADING), ("stepping", STEPPING), ("receiving", RECEIVING)
)  # fmt: skip
_LINES_UNKNOWN = tuple(seconds for _, line in _UNKNOWN for seconds in (line.fixed_s, line.each_s))
_NOTHING = Figures(0, 0, 0, 0, 0, 0.0, 0.0)


class _Offered(NamedTuple):
    """Who they are, where they stand among the members, and their columns in a table of all members."""

    crew: Crew
    places: Sequence[int]
    columns: Columns


class Offers:
    """Of members that have been met; `members` in the order in which they are offered."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._members: dict[str, Member] = {}
        self._changed: dict[Member, None] = {}
        self._doubted: dict[Member, None] = {}
        self._is_laid_out = False
        self._sizes: Collection[int] | None = None  # of blocks, of all of them, once somebody has asked
        self._lay_out()

    def add(self, member: Member) -> None:
        member.on_change = self._changed.__setitem__
        self._members[member.worker_id] = member
        self._is_laid_out = False

    def remove(self, member: Member) -> None:
        member.on_change = None
        del self._members[member.worker_id]
        self._doubted.pop(member, None)
        self._is_laid_out = False

    def doubt(self, member: Member) -> None:
        """Its breaker may forbid it work from now on."""
        self._doubted[member] = None

    @property
    def block_sizes(self) -> Collection[int]:
        """Tokens of a block, of all members that were met."""
        self._refresh(None)
        if self._sizes is None:
            self._sizes = tuple(dict.fromkeys(size for size in self._block_sizes if size))
        return self._sizes

    def loads(self) -> Candidates:
        """Workers that take new work, for whoever looks at their load alone, and does not keep it."""
        self._refresh(None)
        crew, places, columns = self._taking()
        if self._are_few:
            return Candidates(crew, rows=[(0, 0, *self._figures[row], 0.0, *_LINES_UNKNOWN) for row in places])
        return Candidates(crew, self._table[:, columns])

    def candidates(self, matched: Match, num_tokens: int, block_size: int, *, now: float) -> Candidates:
        """Workers that take new work and are trusted. `matched` is an index's answer for a sequence of `num_tokens`
        tokens, of which the last must always be computed."""
        self._refresh(now)
        crew, places, columns = self._trusted(now)
        if self._are_few:
            return Candidates(crew, rows=self._rows_of(crew, places, matched, num_tokens, block_size, now))
        table = self._table[:, columns].copy()
        if len(crew):
            _cached(table, crew, matched, num_tokens, block_size)
            self._expect(table, crew, columns, now)
        return Candidates(crew, table)

    # -- what changes seldom -------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Members have come or gone: all are worked out anew."""
        count = len(self._members)
        self._are_few = count <= FEW
        self._rows = {member: row for row, member in enumerate(self._members.values())}
        self._table = np.zeros((NUM_ROWS, count))
        for name, line in _UNKNOWN:
            self._table[ROWS[name]], self._table[ROWS[name] + 1] = line.fixed_s, line.each_s
        self._standings = np.full((len(Standing._fields), count), np.nan)
        self._token_bytes = np.zeros(count)
        self._figures: list[Figures] = [_NOTHING] * count  # of few, these and their standings are kept as rows
        self._standing: list[Standing[float]] = [NOTHING_KNOWN] * count
        self._roles: list[WorkerRole | None] = [None] * count  # in which each takes work
        self._due = dict.fromkeys(self._members.values())  # whose standing is to be asked for
        self._block_sizes = [0] * count
        self._sizes = None
        self._crew: _Offered | None = None
        self._crew_without: tuple[Collection[Member], _Offered] | None = None
        self._changed.update(dict.fromkeys(self._members.values()))
        self._is_laid_out = True

    def _refresh(self, now: float | None) -> None:
        """Columns of what has changed; with a time, those of the predictor as well."""
        if not self._is_laid_out:
            self._lay_out()
        if self._changed:
            for member in self._changed:
                if (row := self._rows.get(member)) is not None:
                    self._note(member, row)
            self._changed.clear()
        self._note_learned()
        if now is None:
            return
        waiting: dict[Member, None] = {}
        while self._due:
            due, self._due = self._due, {}
            for member in due:
                row = self._rows.get(member)
                if row is None:
                    continue
                role = self._roles[row]
                if role is None:
                    waiting[member] = None
                    continue
                standing = self._predictor.standing(member.worker_id, role, member.load, now=now)
                if self._are_few:
                    self._standing[row] = standing
                else:
                    self._standings[:, row] = standing
            self._note_learned()  # what these have told may be news of others
        self._due = waiting

    def _note_learned(self) -> None:
        for worker_id in self._predictor.changed():
            if (known := self._members.get(worker_id)) is not None:
                self._due[known] = None

    def _note(self, member: Member, row: int) -> None:
        self._due[member] = None
        role = member.role if member.takes_work else None
        if self._roles[row] is not role:  # it may have come back with another one while nobody asked
            self._roles[row] = role
            self._crew = self._crew_without = None
        if member.info is None:
            return
        layout = member.info.layout
        if self._block_sizes[row] != layout.block_size:
            self._block_sizes[row], self._sizes = layout.block_size, None
        self._token_bytes[row] = layout.block_bytes / layout.block_size
        if self._are_few:
            self._figures[row] = member.figures()
        else:
            self._table[ROWS["num_requests"] : ROWS["decode_step_s"] + 1, row] = member.figures()

    # -- who is offered ------------------------------------------------------------------------------------------------

    def _taking(self) -> _Offered:
        if self._crew is None:
            taking = [(member, row) for member, row in self._rows.items() if self._roles[row] is not None]
            self._crew = _crew(taking)
        return self._crew

    def _trusted(self, now: float) -> _Offered:
        """Those that take work, without those whose breaker gives them a pause: never a pool's last."""
        paused = [member for member in self._doubted if not member.breaker.allows(now)]
        if not paused:
            return self._taking()
        if self._crew_without is None or self._crew_without[0] != paused:
            taking = [(member, row) for member, row in self._rows.items() if self._roles[row] is not None]
            roles = {member.role for member, _ in taking if member not in paused}
            kept = [(member, row) for member, row in taking if member not in paused or member.role not in roles]
            self._crew_without = (paused, _crew(kept))
        return self._crew_without[1]

    # -- what changes with every request -------------------------------------------------------------------------------

    def _expect(self, table: Floats, crew: Crew, columns: Columns, now: float) -> None:
        expected = self._predictor.expectations(crew.worker_ids, self._standings[:, columns], now=now)
        table[ROWS["recent_tokens"]] = expected.recent_tokens
        for name in LINES:
            lines = getattr(expected, name)
            table[ROWS[name]], table[ROWS[name] + 1] = lines.fixed_s, lines.each_s
        table[ROWS["loading"] + 1] *= self._token_bytes[columns]

    def _rows_of(
        self, crew: Crew, places: Sequence[int], matched: Match, num_tokens: int, block_size: int, now: float
    ) -> Sequence[Row]:
        """The same for few, worker by worker."""
        rows: list[Row] = []
        if not places:
            return rows
        expected = self._predictor.expected_of_few(crew.worker_ids, [self._standing[row] for row in places], now=now)
        for worker_id, row, known in zip(crew.worker_ids, places, expected, strict=True):
            num_cached = num_host = 0
            if (num_blocks := matched.blocks.get(worker_id)) is not None:
                num_cached = min(num_blocks * block_size, num_tokens - 1)
                if matched.on_device:
                    num_host = num_cached - min(matched.num_on_device(worker_id) * block_size, num_tokens - 1)
            recent, read_s, each_read_s, load_s, each_byte_s, *others = known
            lines = (read_s, each_read_s, load_s, each_byte_s * float(self._token_bytes[row]), *others)
            rows.append((num_cached, num_host, *self._figures[row], recent, *lines))
        return rows


def _cached(table: Floats, crew: Crew, matched: Match, num_tokens: int, block_size: int) -> None:
    cached, hosted = table[ROWS["num_cached_tokens"]], table[ROWS["num_host_tokens"]]
    for worker_id, num_blocks in matched.blocks.items():
        if (place := crew.places.get(worker_id)) is not None:
            cached[place] = num_cached = min(num_blocks * block_size, num_tokens - 1)
            if matched.on_device:
                hosted[place] = num_cached - min(matched.num_on_device(worker_id) * block_size, num_tokens - 1)


def _crew(members: Iterable[tuple[Member, int]]) -> _Offered:
    known = [(member.worker_id, member.role, row) for member, row in members if member.role is not None]
    places = [row for _, _, row in known]
    crew = Crew([worker_id for worker_id, _, _ in known], [role for _, role, _ in known])
    return _Offered(crew, places, columns(places))
