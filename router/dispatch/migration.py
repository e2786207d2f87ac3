"""Migrates running sequences, with their KV, away from draining workers, without a gap for their clients.

    tokens of a ──▶ a drains: b reserves room, a pushes while it continues ──▶ a: MOVED ──▶ b continues ──▶ tokens of b
                             └── no worker has room, or a lane fails: it stays on a; the next try follows after a pause

Every token is sent once: a stops at MOVED, and b gets all tokens that were sent before it. If a or b is lost, or the KV
never arrives, the job continues as after any failure: its dispatcher sends prompt and tokens to another worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from protos.errors import BatonError, TransferFailed
from protos.event_loop import loop_time
from protos.values import FinishReason, MoveRequest, SequenceUpdate, Ticket
from protos.wire import raised
from router.dispatch.job_state import JobState, Reservations
from router.fleet.member import Member
from router.fleet.worker_client import Updates
from router.traces.request_trace import EventKind

log = logging.getLogger("baton.router")

ROOM_TOKENS = 64  # tokens that a sequence may write during its transfer; then it stops and waits
MAX_MOVES_AT_ONCE = 8  # from one worker: fewer migrations at a time end sooner
PAUSE_S = 0.5

Choose = Callable[[JobState, Member], Member]
"""The worker to which a sequence migrates. Raises NoWorkers when there is no other."""

RestOn = Callable[[Sequence[Member]], None]
"""Called with the workers that a sequence depends on after a migration: later failures are attributed to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationTarget:
    worker: Member
    request_id: str
    updates: Updates


class _Migration:
    def __init__(self) -> None:
        self.to: Member | None = None
        self.request_id = ""
        self.ticket: Ticket | None = None
        self.over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def end(self, *, adopted: bool = False) -> None:
        self.over.set()
        if self.task is not None:
            self.task.cancel()
        if self.to is not None and not adopted:
            self.to.abort(self.request_id)


class Migrations:
    """Migrates the sequences of a router. `num_moved` counts migrations, `num_stayed` failed attempts."""

    def __init__(self, choose: Choose, reserve: Reservations) -> None:
        self._choose = choose
        self._reserve = reserve
        self._gates: WeakKeyDictionary[Member, asyncio.Semaphore] = WeakKeyDictionary()
        self.num_moved = 0
        self.num_stayed = 0
        self._logged: set[tuple[str, type[BatonError]]] = set()  # why sequences stay, since the last move

    async def follow(
        self, job_state: JobState, place: MigrationTarget, depends_on: RestOn
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """All updates of a running sequence, on any worker. The caller must record each update in the job's state
        before it reads the next. An early close or an error aborts the sequence on every worker but the first. The
        job's sink receives no token from a worker's first update, nor while a migration is due or under way."""
        here, again_s = place, 0.0
        left: MigrationTarget | None = None
        move: _Migration | None = None
        job_state.job.client.send = lambda is_unread: here.worker.set_unread(here.request_id, is_unread)
        try:
            while True:
                update = await anext(here.updates)
                if left is not None:  # the KV has arrived: the old worker is done, and cannot fail any more
                    left.worker.abort(left.request_id)
                    left = None
                    depends_on((here.worker,))
                if update.finish_reason is FinishReason.MOVED:
                    if update.token_ids:  # a slow client gets the last tokens together with the migration
                        yield replace(update, finish_reason=None)
                    here, left = self._take_over(job_state, here, move), here
                    depends_on((left.worker, here.worker))
                    move = None
                    continue
                if update.error is not None and update.finish_reason is None:
                    if move is not None:
                        self._stays(here, move, raised(update.error))
                    move, again_s = None, loop_time() + PAUSE_S
                    continue
                yield update
                here.updates.attach(job_state.job.client.sink if move is None and job_state.may_skip_deltas else None)
                if update.finish_reason is not None:
                    if here is not place:
                        here.worker.release(here.request_id)
                    return
                if move is not None and move.over.is_set():
                    move, again_s = None, loop_time() + PAUSE_S
                if move is None and here.worker.drains and loop_time() >= again_s:
                    move = self._begin(job_state, here)
        finally:
            job_state.job.client.send = None
            here.updates.attach(None)
            if move is not None:
                move.end()
            if left is not None:
                left.worker.abort(left.request_id)
            if here is not place:
                here.worker.abort(here.request_id)

    def _begin(self, job_state: JobState, here: MigrationTarget) -> _Migration:
        move = _Migration()
        move.task = asyncio.create_task(self._arrange(job_state, here, move), name=f"move of {here.request_id}")
        return move

    async def _arrange(self, job_state: JobState, here: MigrationTarget, move: _Migration) -> None:
        async with self._gates.setdefault(here.worker, asyncio.Semaphore(MAX_MOVES_AT_ONCE)):
            try:
                to = self._choose(job_state, here.worker)
                move.request_id, generation = job_state.next_id()
                to.route(move.request_id, 0)
                move.to = to
                assert to.info is not None
                job, stop = job_state.job, job_state.num_tokens - 1  # the last token has no KV yet
                most = min(len(job.prompt_ids) + job.sampling.max_tokens, to.info.max_model_len)
                asked = self._reserve(
                    job_state, here.worker, move.request_id, generation, stop=stop,
                    num_tokens=min(stop + ROOM_TOKENS, most),
                )  # fmt: skip
                move.ticket = await to.reserve(asked)
                here.worker.move(MoveRequest(request_id=here.request_id, ticket=move.ticket))
            except BatonError as error:
                self._stays(here, move, error)
                return
            await move.over.wait()

    def _take_over(self, job_state: JobState, here: MigrationTarget, move: _Migration | None) -> MigrationTarget:
        if move is None or move.to is None or move.ticket is None:
            raise TransferFailed(
                f"worker {here.worker.worker_id} ended {here.request_id} as migrated, without a request to migrate it"
            )
        updates = move.to.submit(job_state.request(move.request_id, ticket=move.ticket))
        here.updates.forward_failures_to(updates)  # until the KV has arrived, the loss of either worker loses it
        move.end(adopted=True)
        self.num_moved += 1
        self._logged.clear()
        job_state.record.note(EventKind.MOVED, loop_time(), source=here.worker.worker_id, worker=move.to.worker_id)
        log.info(
            "%s continues on %s as %s",
            here.request_id,
            move.to.worker_id,
            move.request_id,
            extra={"request": here.request_id},
        )
        return MigrationTarget(worker=move.to, request_id=move.request_id, updates=updates)

    def _stays(self, here: MigrationTarget, move: _Migration, error: BatonError) -> None:
        self.num_stayed += 1
        why = (here.worker.worker_id, type(error))  # each request retries: log a reason once
        level = logging.DEBUG if why in self._logged else logging.INFO
        self._logged.add(why)
        log.log(level, "%s stays on %s for now: %s", here.request_id, here.worker.worker_id, error.message)
        move.end()
