"""Finds the request that crashes its workers, and rejects no request that only ran beside it.

    worker lost ─▶ a crash counted for each job on it ─▶ `max_worker_crashes` ─┬─ one job in that loss: rejected
                             ▲                                                 └─ several: halved, tried half by half
       a token since then: back to none                 ◀──────── no loss ─────┤
                                                          a loss again ────────┴─▶ halved again, down to one

A host that takes several workers with it looks like a request that killed two: a worker that is lost within `MOMENT_S`
of getting the job was dying already, and the loss is not counted, once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.errors import RequestKillsWorkers
from protos.event_loop import Changed

PAUSE_S = 0.05
"""Seconds until the other jobs of a lost worker are suspected, too: they learn of the loss at nearly the same time."""
MOMENT_S = 0.05
"""Seconds that a job must have been on its second worker for the worker's loss to be counted."""
MAX_LOSSES = 256
MAX_ROUNDS = 16
"""The most trials of one job that may end with a loss. By then, any group has been halved down to one job."""

Life = tuple[str, int]
"""A worker's id and incarnation."""


@dataclass(slots=True, eq=False)
class CrashHistory:
    """The crashes of one job. The job waits for the turn of its `batch`, and leaves the batch once it gets a token.
    `num_rounds` of its trials have ended with a loss. `is_excused`: one loss was not counted."""

    crash_count: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    is_excused: bool = False
    batch: set[CrashHistory] | None = None


@dataclass(slots=True, eq=False)
class _WorkerLoss:
    """The jobs that reached the limit in one loss: `num_jobs` in all, of which `jobs` remain. They are divided once."""

    num_jobs: int = 0
    jobs: list[CrashHistory] = field(default_factory=list)
    is_divided: bool = False


class PoisonRequests:
    """The poison requests of one dispatcher, on its event loop. The first batch in line is tried; if it takes longer
    than `patience_s`, the next batch is tried too."""

    def __init__(self, *, max_worker_crashes: int, patience_s: float) -> None:
        self._max_kills = max_worker_crashes
        self._patience_s = patience_s
        self._losses: OrderedDict[Life, _WorkerLoss] = OrderedDict()
        self._line: list[set[CrashHistory]] = []
        self._num_tried = 1  # batches from the head of the line
        self._moved = Changed()
        self.num_rejected = 0

    @property
    def are_tried(self) -> bool:
        return bool(self._line)

    async def lost(self, job_id: str, crashes: CrashHistory, life: Life, num_tokens: int, *, there_s: float) -> None:
        """Records the loss of a worker with the job on it, `there_s` after it was chosen; the job has `num_tokens` of
        its answer. Returns when the job may await its `turn`. Raises RequestKillsWorkers if the job must not be tried
        again."""
        was_tried = crashes.batch is not None
        self.drop(crashes)
        if num_tokens > crashes.num_tokens:
            crashes.crash_count = crashes.num_rounds = 0
            crashes.is_excused = False
        if there_s < MOMENT_S and crashes.crash_count and not (was_tried or crashes.is_excused):
            crashes.is_excused = True
            return
        crashes.crash_count += 1
        crashes.num_tokens = num_tokens
        if crashes.crash_count < self._max_kills:
            return
        crashes.num_rounds += was_tried
        loss = self._losses.setdefault(life, _WorkerLoss())
        while len(self._losses) > MAX_LOSSES:
            self._losses.popitem(last=False)
        loss.num_jobs += 1
        loss.jobs.append(crashes)
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            loss.jobs.remove(crashes)
        if loss.num_jobs == 1 or crashes.num_rounds > MAX_ROUNDS:
            raise self._rejection(job_id, crashes, life)
        if not loss.is_divided:
            loss.is_divided = True
            self._divide([crashes, *loss.jobs])
        elif crashes.batch is None:  # its loss was reported late
            self._divide([crashes])

    async def turn(self, crashes: CrashHistory) -> bool:
        waited = False
        while (batch := crashes.batch) is not None and not any(batch is tried for tried in self._tried()):
            waited, num_moves = True, self._moved.count
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._moved.wait()
            except TimeoutError:
                if num_moves == self._moved.count:  # the first of all waiting jobs
                    self._num_tried += 1
                    self._moved.notify()
        return waited

    def progressed(self, crashes: CrashHistory, num_tokens: int) -> None:
        if num_tokens > crashes.num_tokens:
            self.drop(crashes)

    def drop(self, crashes: CrashHistory) -> None:
        batch, crashes.batch = crashes.batch, None
        if batch is None:
            return
        batch.discard(crashes)
        if not batch:
            place = next(place for place, queued in enumerate(self._line) if queued is batch)
            del self._line[place]
            if place == 0:  # the next suspects take the place of each batch tried beside a slow one
                self._num_tried = max(1, self._num_tried - 1)
            if not self._line:  # after a later loss, one batch at a time is tried again
                self._num_tried = 1
        self._moved.notify()

    def assert_idle(self) -> None:
        assert not self._line, "jobs are still tried after all attempts have ended"

    def _divide(self, jobs: Sequence[CrashHistory]) -> None:
        middle = len(jobs) // 2
        for half in (set(jobs[:middle]), set(jobs[middle:])):
            for crashes in half:
                crashes.batch = half
            if half:
                self._line.append(half)

    def _tried(self) -> Sequence[set[CrashHistory]]:
        return self._line[: self._num_tried]

    def _rejection(self, job_id: str, crashes: CrashHistory, life: Life) -> RequestKillsWorkers:
        self.num_rejected += 1
        return RequestKillsWorkers(
            f"request {job_id} was running on {crashes.crash_count} workers when they died, "
            f"the last of them {life[0]}: "
            "it is not tried again. Their logs say what they died of; please report it"
        )
