"""Admits jobs of batches where people leave room, and suspends them when people need it.

    job ─▶ queue, first come ─▶ nobody waits, and a worker has room ─▶ workers ─▶ tokens ─▶ ... ─▶ end
             ▲                                                           │
             └── suspended: its tokens are kept, and it goes on from ◀───┘ people wait, or their tokens would be late

A job that is too large for the room there is lets smaller ones pass, but not always: for `HOLD_S` after each `PASS_S`
the room that others leave is kept for it.

A decode worker has room for one sequence more while

- the step that it is predicted to have then is at most `slowdown` times that of the people on it, and within the
  objective for the time between tokens; on a worker without people, the objective alone counts
- a share of its blocks stays free, and no request waits there"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from protos.event_loop import loop_time
from router.admission.admission import IdleFleet
from router.jobs import BATCH_PRIORITY, Generate, Job, TokenDelta
from router.prefix.index import NO_MATCH
from router.routing.candidate_columns import Bools, CandidateTable, Floats

PREFILL_SHARE = 0.1
"""Share of the objective for a first token: a prefill worker with so much work has no room."""
FREE_SHARE = 0.1
"""Share of a worker's blocks: people's next requests find them free."""
UNMEASURED = 4
"""Sequences on a worker whose steps have not been measured."""
DECISION_S = 0.02
"""Between two decisions about who is suspended."""
SHED_SHARE = 0.25
"""Share of a worker's jobs of batches that are suspended at a time while people wait."""
PASS_S, HOLD_S = 60.0, 10.0
"""How long smaller jobs pass the head of the queue, for which there is no room, and how long they then do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLimits:
    """`ttft_s`, `tpot_s`: the objectives of people's requests. `slowdown`: how many times longer their steps may
    become."""

    ttft_s: float
    tpot_s: float
    slowdown: float


def step_limits(decode: CandidateTable, limits: IdleLimits, batch_jobs: Counter[str]) -> Floats:
    people = _people(decode, batch_jobs)
    alone_s = np.asarray(decode.step_time(people), dtype=np.float64)
    slower_s = np.minimum(limits.tpot_s, limits.slowdown * alone_s)
    return np.where((people > 0) & (alone_s > 0), slower_s, limits.tpot_s)


def largest_job(table: CandidateTable, limits: IdleLimits, batch_jobs: Counter[str]) -> float:
    prefill, decode = table.prefill_pool, table.decode_pool
    if not len(decode):
        return -np.inf
    step_s = decode.step_time(decode.num_requests + 1)
    in_time = np.where(step_s > 0, step_s <= step_limits(decode, limits, batch_jobs), decode.num_requests < UNMEASURED)
    # A few on a worker without people, however slow its steps are: a batch continues there.
    in_time |= (_people(decode, batch_jobs) == 0) & (decode.num_requests < UNMEASURED)
    in_time &= decode.num_waiting == 0
    if not len(prefill):
        return _most_blocks(decode, in_time & _can_prefill(decode, limits))
    return min(_most_blocks(decode, in_time), _most_blocks(prefill, _can_prefill(prefill, limits)))


def to_shed(
    table: CandidateTable,
    limits: IdleLimits,
    batch_jobs: Counter[str],
    *,
    people_wait: bool = False,
    num_unplaced: int = 0,
) -> Counter[str]:
    """How many jobs of batches to suspend on each worker. `num_unplaced` jobs have no token yet, and may wait on any
    worker."""
    decode = table.decode_pool
    if not len(decode):
        return Counter()
    limit_s, step_s = step_limits(decode, limits, batch_jobs), decode.step_time(decode.num_requests)
    each_s = np.broadcast_to(np.asarray(decode.step_time.each_s), step_s.shape)
    people = _people(decode, batch_jobs)
    shed: Counter[str] = Counter()
    for place, worker_id in enumerate(decode.workers.worker_ids):
        here = batch_jobs[worker_id]
        over_s = step_s[place] - limit_s[place]
        if here and people[place] > 0 and over_s > 0 and each_s[place] > 0:
            shed[worker_id] = min(here, int(np.ceil(over_s / each_s[place])))
        if here and (people_wait or decode.num_waiting[place] > num_unplaced):
            shed[worker_id] = max(shed[worker_id], int(np.ceil(SHED_SHARE * here)))
    return shed


def _people(table: CandidateTable, batch_jobs: Counter[str]) -> Floats:
    batches = np.array([batch_jobs[worker_id] for worker_id in table.workers.worker_ids], dtype=np.float64)
    return np.maximum(0.0, table.num_requests - batches)


def _most_blocks(table: CandidateTable, allowed: Bools) -> float:
    """The most blocks of a job on an `allowed` worker. An idle worker reserves one block, others their share."""
    reserve = np.where(table.num_requests == 0, 1, FREE_SHARE * table.num_blocks)
    return float(np.where(allowed, table.num_free_blocks - reserve, -np.inf).max())


def _can_prefill(table: CandidateTable, limits: IdleLimits) -> Bools:
    queued = table.queued_prefill_tokens
    short: Bools = (queued == 0) | (table.prefill_time(queued) <= PREFILL_SHARE * limits.ttft_s)
    return short


@dataclass(slots=True, eq=False)
class QueuedJob:
    num_blocks: int
    admitted: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class BatchRun:
    """A run of a job. `worker_id`: the worker that decodes it, "" before it is known."""

    number: int
    request_id: str
    worker_id: str = ""
    has_token: bool = False
    is_suspended: bool = False


class IdleAdmission:
    """The `Generate` of batches, over the dispatcher's. `num_waiting`: people's requests that wait at this gateway.
    `decided`: where a job decodes. Lives on one event loop; it has no start and no stop."""

    def __init__(
        self,
        generate: Generate,
        *,
        fleet: IdleFleet,
        limits: IdleLimits,
        num_waiting: Callable[[], int],
        decided: Callable[[str], str],
    ) -> None:
        self._generate = generate
        self._fleet = fleet
        self._limits = limits
        self._num_waiting = num_waiting
        self._decided = decided
        self._queue: list[QueuedJob] = []
        self._admitting: asyncio.Task[None] | None = None  # while jobs wait
        self._passed: QueuedJob | None = None  # the head of the queue, and since when there is no room for it
        self._passed_since_s = 0.0
        self._runs: dict[int, BatchRun] = {}
        self._num_begun = 0
        self._decided_s = float("-inf")
        self.num_suspended = 0

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        job.client.sink = None  # a suspended job must have its tokens
        job = replace(job, priority=BATCH_PRIORITY, max_ttft_s=None)
        emitted: list[int] = []
        while True:
            await self._wait_for_room(len(job.prompt_ids) + len(emitted))
            run = self._begin(job)
            resumed = replace(job, request_id=run.request_id, emitted=tuple(emitted))
            try:
                async with aclosing(self._generate(resumed)) as deltas:
                    async for delta in deltas:
                        emitted += delta.token_ids
                        yield delta
                        if delta.finish_reason is not None:
                            return
                        if self._must_stop(run):
                            break
            finally:
                del self._runs[run.number]
            self.num_suspended += 1

    def _jobs_by_worker(self) -> Counter[str]:
        for run in self._runs.values():
            if not run.worker_id:
                run.worker_id = self._decided(run.request_id)
        return Counter(run.worker_id for run in self._runs.values() if not run.is_suspended)

    def _people_wait(self) -> bool:
        return self._num_waiting() > 0 or self._fleet.num_turned_away > 0

    async def _wait_for_room(self, num_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        num_blocks = -(-num_tokens // (self._fleet.block_size or 1)) + 1
        queued = QueuedJob(num_blocks, loop.create_future())
        self._queue.append(queued)
        if self._admitting is None or self._admitting.done():  # it ends with an error of the fleet
            self._admitting = loop.create_task(self._admit_all(), name="admission of batches")
        try:
            await queued.admitted
        finally:
            if queued in self._queue:
                self._queue.remove(queued)
            if not self._queue and self._admitting is not None:
                self._admitting.cancel()
                self._admitting = None

    async def _admit_all(self) -> None:
        """Admits jobs, in one task for the whole queue: each decision reads the whole fleet."""
        try:
            while self._queue:
                if (job := self._next_job()) is None:
                    await self._fleet.wait(until=loop_time() + 1.0)
                    continue
                self._queue.remove(job)
                if not job.admitted.done():
                    job.admitted.set_result(None)
                await asyncio.sleep(0)  # lets the job be routed and counted
        except Exception as error:  # of the fleet: each job in the queue raises it
            for job in self._queue:
                if not job.admitted.done():
                    job.admitted.set_exception(error)

    def _next_job(self) -> QueuedJob | None:
        """The first job for which there is room. See `PASS_S` for one that is too large."""
        if self._people_wait():
            return None
        most = largest_job(self._fleet.candidates(NO_MATCH, 1), self._limits, self._jobs_by_worker())
        first, now = self._queue[0], loop_time()
        if first.num_blocks <= most:
            return first
        if first is not self._passed:
            self._passed, self._passed_since_s = first, now
        if (now - self._passed_since_s) % (PASS_S + HOLD_S) >= PASS_S:
            return None
        return next((job for job in self._queue if job.num_blocks <= most), None)

    def _begin(self, job: Job) -> BatchRun:
        """Begins a run with an id that is unique over all gateways: a worker may still have the job's last run."""
        self._num_begun += 1
        run = BatchRun(self._num_begun, f"{job.request_id}@{self._fleet.gateway_id}-{self._num_begun}")
        self._runs[run.number] = run
        return run

    def _must_stop(self, run: BatchRun) -> bool:
        run.has_token = True
        now = loop_time()
        if now - self._decided_s >= DECISION_S:
            self._decided_s = now
            batch_jobs, table = self._jobs_by_worker(), self._fleet.candidates(NO_MATCH, 1)
            unread = sum(not run.has_token for run in self._runs.values())
            self._suspend(
                to_shed(table, self._limits, batch_jobs, people_wait=self._people_wait(), num_unplaced=unread)
            )
        return run.is_suspended

    def _suspend(self, shed: Counter[str]) -> None:
        for run in reversed(self._runs.values()):
            if not run.is_suspended and shed[run.worker_id] > 0:
                shed[run.worker_id] -= 1
                run.is_suspended = True
