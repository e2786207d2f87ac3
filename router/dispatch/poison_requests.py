"""Finds the request that crashes its workers before it has crashed them all, and rejects none that only ran beside it.

    worker lost ─▶ a crash counted for each job on it ─▶ `max_worker_crashes` ─┬─ one job in that loss: rejected
                             ▲                                                 └─ several: halved, tried half by half
       a token since then: back to none                 ◀──────── no loss ─────┤
                                                          a loss again ────────┴─▶ halved again, down to one

A request that crashes workers is found with as many further losses as the logarithm of the jobs lost with it. A request
that gets a few tokens in each life of a worker is bounded by its attempts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.errors import RequestKillsWorkers
from protos.event_loop import Changed

PAUSE_S = 0.05
"""Time for the other jobs of a lost worker to be suspected, too: they learn of the loss within an instant."""
MAX_LOSSES = 256
MAX_ROUNDS = 16
"""Trials of one job that end with a loss. Halves of any group are down to one job before."""

Life = tuple[str, int]
"""A worker's id and incarnation."""


@dataclass(slots=True, eq=False)
class CrashHistory:
    """The case against one job. It waits for the turn of its `batch`, and leaves the batch once it gets a token;
    `num_rounds` of its trials have ended with a loss."""

    crash_count: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    batch: set[CrashHistory] | None = None


@dataclass(slots=True, eq=False)
class _WorkerLoss:
    """Jobs that struck out in the loss of one life: `num_jobs` in all, of which `jobs` are still here. Divided once."""

    num_jobs: int = 0
    jobs: list[CrashHistory] = field(default_factory=list)
    is_divided: bool = False


class PoisonRequests:
    """One for a dispatcher. Lives on its event loop. The batch at the head of the line is tried; when the line has not
    moved for `patience_s`, the next one is tried beside it: a slow one costs the others time, and not their answers.
    """

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
        """True if a queued job is the likely reason for a loss."""
        return bool(self._line)

    async def lost(self, job_id: str, crashes: CrashHistory, life: Life, num_tokens: int) -> None:
        """A worker was lost with the job on it, which has `num_tokens` of its answer. Returns when it is known where
        the job stands, for it to await its `turn`; raises RequestKillsWorkers when it is not tried again."""
        was_tried = crashes.batch is not None
        self.drop(crashes)
        if num_tokens > crashes.num_tokens:
            crashes.crash_count = crashes.num_rounds = 0
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
        elif crashes.batch is None:  # it came forward late
            self._divide([crashes])

    async def turn(self, crashes: CrashHistory) -> bool:
        """Returns when the job may be tried: at once unless others are tried before it. Whether it had to wait."""
        waited = False
        while (batch := crashes.batch) is not None and not any(batch is one for one in self._tried()):
            waited, num_moves = True, self._moved.count
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._moved.wait()
            except TimeoutError:
                if num_moves == self._moved.count:  # the first of all that wait
                    self._num_tried += 1
                    self._moved.notify()
        return waited

    def progressed(self, crashes: CrashHistory, num_tokens: int) -> None:
        """Records that the answer has this many tokens now."""
        if num_tokens > crashes.num_tokens:
            self.drop(crashes)

    def drop(self, crashes: CrashHistory) -> None:
        """Ends the job's trials: it continues, has ended, or was lost. Idempotent."""
        batch, crashes.batch = crashes.batch, None
        if batch is None:
            return
        batch.discard(crashes)
        if not batch:
            place = next(place for place, one in enumerate(self._line) if one is batch)
            del self._line[place]
            if place == 0:  # the next suspects replace each one tried beside a slow one
                self._num_tried = max(1, self._num_tried - 1)
            if not self._line:  # a later loss is tried from one batch on again
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
