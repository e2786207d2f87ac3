"""The fleet's workers as columns, from which each request's `CandidateTable` is cut."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from protos.values import WorkerRole
from router.fleet.member import Member
from router.prefix.index import Match
from router.routing.candidate_columns import (
    LOAD_ROWS,
    NUM_ROWS,
    ROWS,
    CandidateTable,
    WorkerSet,
    WorkerSubset,
    columns_of,
)
from router.routing.predictor import UNOBSERVED, Predictor, WorkerFeatures


class FleetTable:
    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._members: dict[str, Member] = {}
        self._changed: dict[Member, None] = {}
        self._doubted: dict[Member, None] = {}
        self._is_laid_out = False
        self._sizes: Collection[int] | None = None  # of blocks, once computed
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
        self._doubted[member] = None

    @property
    def block_sizes(self) -> Collection[int]:
        self._refresh()
        if self._sizes is None:
            self._sizes = tuple(dict.fromkeys(size for size in self._block_sizes if size))
        return self._sizes

    def loads(self) -> CandidateTable:
        """The workers that take new work, with their load alone. The table changes with the fleet: do not keep it."""
        self._refresh()
        workers, columns = self._taking_work()
        return CandidateTable(workers, self._values[:, columns])

    def candidates(self, matched: Match, num_tokens: int, block_size: int, *, now: float) -> CandidateTable:
        self._refresh()
        self._refresh_features(now)
        workers, columns = self._trusted(now)
        table = CandidateTable(workers, self._values[:, columns].copy())
        if len(workers):
            _fill_cached(table, matched, num_tokens, block_size)
            self._predictor.predict(table, self._features[:, columns], now=now)
        return table

    # -- columns that change seldom ------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        count = len(self._members)
        self._places = {member: place for place, member in enumerate(self._members.values())}
        self._values = np.zeros((NUM_ROWS, count))
        for name, line in UNOBSERVED.items():
            self._values[ROWS[name]], self._values[ROWS[name] + 1] = line.fixed_s, line.each_s
        self._features = np.full((len(WorkerFeatures._fields), count), np.nan)
        self._roles: list[WorkerRole | None] = [None] * count  # the role in which each worker takes work
        self._due = dict.fromkeys(self._members.values())  # members whose features must be computed again
        self._block_sizes = [0] * count
        self._sizes = None
        self._taking: WorkerSubset | None = None
        self._without: tuple[Collection[Member], WorkerSubset] | None = None
        self._changed.update(dict.fromkeys(self._members.values()))
        self._is_laid_out = True

    def _refresh(self) -> None:
        if not self._is_laid_out:
            self._lay_out()
        if not self._changed:
            return
        for member in self._changed:
            if (place := self._places.get(member)) is not None:
                self._note(member, place)
                self._values[LOAD_ROWS, place] = member.load_row()
        self._changed.clear()

    def _note(self, member: Member, place: int) -> None:
        self._due[member] = None
        role = member.role if member.takes_work else None
        if self._roles[place] is not role:  # a worker may return in another role
            self._roles[place] = role
            self._taking = self._without = None
        if member.info is None:
            return
        layout = member.info.layout
        if self._block_sizes[place] != layout.block_size:
            self._block_sizes[place], self._sizes = layout.block_size, None

    def _refresh_features(self, now: float) -> None:
        self._note_observed()
        waiting: dict[Member, None] = {}
        while self._due:
            due, self._due = self._due, {}
            for member in due:
                if (place := self._places.get(member)) is None:
                    continue
                if (role := self._roles[place]) is None:
                    waiting[member] = None
                    continue
                features = self._predictor.features(member.worker_id, role, member.load, now=now)
                self._features[:, place] = features
                self._features[_LOAD_EACH, place] *= member.token_bytes
            self._note_observed()  # other members may now count as slow
        self._due = waiting

    def _note_observed(self) -> None:
        for worker_id in self._predictor.changed():
            if (member := self._members.get(worker_id)) is not None:
                self._due[member] = None

    # -- the workers that are offered ----------------------------------------------------------------------------------

    def _taking_work(self) -> WorkerSubset:
        if self._taking is None:
            self._taking = self._subset()
        return self._taking

    def _trusted(self, now: float) -> WorkerSubset:
        """The workers that take work, without those that their breakers pause. The last worker of a pool is always
        included."""
        paused = [member for member in self._doubted if not member.breaker.allows(now)]
        if not paused:
            return self._taking_work()
        if self._without is None or self._without[0] != paused:
            self._without = (paused, self._subset(paused))
        return self._without[1]

    def _subset(self, paused: Collection[Member] = ()) -> WorkerSubset:
        taking = [
            (member.worker_id, role, place, member in paused)
            for member, place in self._places.items()
            if (role := self._roles[place]) is not None
        ]
        roles = {role for _, role, _, is_paused in taking if not is_paused}
        offered = [
            (worker_id, role, place) for worker_id, role, place, paused in taking if not paused or role not in roles
        ]
        workers = WorkerSet((worker_id for worker_id, _, _ in offered), (role for _, role, _ in offered))
        return WorkerSubset(workers, columns_of([place for _, _, place in offered]))


_LOAD_EACH = WorkerFeatures._fields.index("load_each_s")  # per byte, until it is converted to a token


def _fill_cached(table: CandidateTable, matched: Match, num_tokens: int, block_size: int) -> None:
    cached, on_host = table.num_cached_tokens, table.num_host_tokens
    for worker_id, num_blocks in matched.blocks.items():
        if (place := table.workers.places.get(worker_id)) is not None:
            cached[place] = num_cached = min(num_blocks * block_size, num_tokens - 1)
            if matched.on_device:
                on_host[place] = num_cached - min(matched.num_on_device(worker_id) * block_size, num_tokens - 1)
