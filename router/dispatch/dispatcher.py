"""The life of a job, from its token ids to its last token, also when workers fail.

    hash blocks ─▶ match ─▶ decide ─┬─ alone ───────▶ submit to d ──────────────────────────────▶ tokens of d
        ▲                           │
        │                           └─ handed over ─▶ d: reserve ─▶ ticket, renewed until the first token
        │                                             p: submit(ticket) ─▶ first token ─────────▶ token of p
        │                                             d: submit(ticket, first token) ───────────▶ tokens of d
        │                                                 KV travels p ══▶ d meanwhile
        │   d drains: its sequences migrate, with their KV (`router.dispatch.migration`)
        └── worker lost, KV lost, draining: prompt + emitted tokens go to another pair; the client sees a pause
            internal error before the first token: the same, and it counts against the worker
            no worker, or no room: wait for the fleet to change, for `max_queue_s` at most; an answer that has begun
            waits for up to `successor_timeout_s` while a worker is being started

A consumer that closes the stream aborts the job on both workers (`finally`). If a client disconnects during a
reservation, the reservation is released as soon as its answer arrives (`WorkerClient.reserve`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace

from protos.errors import (
    AdapterNotLoaded,
    BatonError,
    Internal,
    NoWorkers,
    Overloaded,
    RevisionReplaced,
    TransferFailed,
    WorkerDraining,
    WorkerLost,
)
from protos.event_loop import loop_time
from protos.values import FinishReason, ReserveRequest, SequenceUpdate, Ticket
from router.dispatch.chooser import Chooser, Routing, routing_of
from router.dispatch.job_state import JobState, Reservations
from router.dispatch.migration import Migrations, MigrationTarget
from router.dispatch.poison_requests import Life, PoisonRequests
from router.dispatch.prefix_pull import PrefixPull, PrefixPulls
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.fleet.worker_client import Updates
from router.jobs import Job, TokenDelta
from router.prefix.index import NO_MATCH
from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable
from router.routing.decision import Decision, Policy
from router.traces.request_trace import EventKind

log = logging.getLogger("baton.router")

RETRY_AFTER_S = 1.0  # for a client, if the worker sent none
RENEWALS_A_LEASE = 3


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt to run a job on one worker or one pair. `prefill` is None if `decode` does both; `pull` is the prefix
    that the prefill worker fetches instead of computing it. A migrated sequence depends on other `members`.
    `is_reserved`: the decode worker of a pair has blocks for it. `begun_s`: when the workers were chosen, by the loop's
    clock."""

    request_id: str
    generation: int
    prefill: Member | None
    decode: Member
    pull: PrefixPull | None = None
    moved_to: Sequence[Member] = ()
    is_reserved: bool = False
    begun_s: float = field(default_factory=loop_time)

    @property
    def prefill_worker(self) -> Member:
        return self.prefill or self.decode

    @property
    def members(self) -> Sequence[Member]:
        if self.moved_to:
            return self.moved_to
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(member.worker_id for member in self.members)

    @property
    def refuser(self) -> Member:
        return self.prefill_worker if self.is_reserved else self.decode

    def end_pull(self) -> None:
        pull, self.pull = self.pull, None
        if pull is not None:
            pull.end()

    def depends_on(self, members: Sequence[Member]) -> None:
        self.moved_to = members

    def lost(self) -> Life | None:
        gone = (member for member in self.members if member.client is None or member.client.lost)
        return next(((member.worker_id, member.info.incarnation) for member in gone if member.info is not None), None)


class Dispatcher:
    """Runs jobs on a fleet: the router's `Generate`. Lives on one event loop, whose clock it uses.

    `num_cached_tokens` of a job counts the prompt tokens that its prefill worker found in its own cache or pulled from
    another worker's. All other prompt tokens were computed. Tokens cached on the decode worker save a transfer, not a
    computation, and do not count.
    """

    def __init__(self, *, fleet: Fleet, policy: Policy, config: RouterConfig, routing: Routing | None = None) -> None:
        self._fleet = fleet
        self._config = config
        self._chooser = Chooser(fleet=fleet, policy=policy, routing=routing or routing_of(config))
        self._line = asyncio.Lock()
        self._reserve = Reservations(gateway_id=fleet.offers.gateway_id, lease_s=config.dispatch.ticket_lease_s)
        self.moves = Migrations(self._elsewhere, self._reserve)
        self.pulls = PrefixPulls(fleet, self._reserve)
        self._poison = PoisonRequests(
            max_worker_crashes=config.dispatch.max_worker_crashes, patience_s=config.admission.max_queue_s
        )
        self.num_resumed = 0

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        record = self._chooser.record(job)
        job_state = JobState(job, now=loop_time(), record=record)
        record.note(EventKind.ADMITTED, loop_time())
        if job.adapter:
            self._fleet.lora.count(job.adapter)
        try:
            while True:
                attempt: Attempt | None = None
                try:
                    if await self._poison.turn(job_state.crashes):
                        job_state.blocked_since_s = None
                    attempt = self._decide(job_state)
                    async with aclosing(self._run(job_state, attempt)) as updates:
                        async for update in updates:
                            yield (delta := self._note(update, job_state, attempt))
                            if delta.finish_reason is not None:
                                return
                    raise Internal(f"{attempt.request_id} ended without a reason on {', '.join(attempt.worker_ids)}")
                except BatonError as error:
                    await self._recover(error, job_state, attempt)
        finally:
            self._poison.drop(job_state.crashes)

    def _note(self, update: SequenceUpdate, job_state: JobState, attempt: Attempt) -> TokenDelta:
        chooser, record = self._chooser, job_state.record
        first = not job_state.output_ids
        delta = job_state.append(update)
        if job_state.crashes.crash_count:
            self._poison.progressed(job_state.crashes, len(job_state.output_ids))
        if first and delta.token_ids:
            self._fleet.offers.count_read(
                attempt.prefill_worker, len(job_state.job.prompt_ids), delta.num_cached_tokens
            )
        if update.num_drafted:
            record.verified(update.num_drafted, update.num_accepted)
        if delta.num_prompt_computed:
            record.computed(delta.num_prompt_computed, loop_time())
        if delta.token_ids:
            chooser.took(record, len(delta.token_ids), delta.num_cached_tokens)
        if delta.finish_reason is not None:
            if (drafts := attempt.members[-1].load.speculation) is not None and drafts.paused:
                record.timestamps.paused_drafts = tuple([proposer.source for proposer in drafts.paused])
            chooser.ended(record, delta.finish_reason)
            for member in attempt.members:
                member.breaker.succeeded()
        return delta

    def decision(self, request_id: str) -> tuple[Decision, ...]:
        return self._chooser.decisions(request_id)

    def assert_idle(self) -> None:
        self._poison.assert_idle()
        assert not self._line.locked(), "a job waits in line for room after all jobs have ended"

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, job_state: JobState) -> Attempt:
        fleet = self._fleet
        self._keep_revision(job_state)
        candidates = self._candidates(job_state)
        if not len(candidates.decode_pool):
            fleet.sleep.wanted.set()
            raise NoWorkers(": ".join(filter(None, ("no worker is ready", ", ".join(fleet.successors.of(None))))))
        decision = self._chooser.choose(job_state, candidates)
        job_state.know_cached(candidates.most_cached)
        request_id, generation = job_state.next_attempt()
        prefill_worker = fleet.member(decision.prefill or decision.decode)
        is_pair = decision.prefill is not None and job_state.job.sampling.needs_decode
        pull = self.pulls.choose(job_state, request_id, generation, prefill_worker, candidates)
        attempt = Attempt(
            request_id=request_id,
            generation=generation,
            prefill=prefill_worker if is_pair else None,
            decode=fleet.member(decision.decode) if is_pair else prefill_worker,
            pull=pull,
        )
        num_known = job_state.record.choices[-1].prefill_worker.num_cached_tokens
        num_cached = pull.num_tokens if pull is not None else num_known
        job_state.unread.setdefault(prefill_worker.worker_id, num_known // (fleet.offers.block_size or 1))
        num_blocks = -(-job_state.num_tokens // (fleet.offers.block_size or 1))
        attempt.decode.route(request_id, 0, num_blocks)
        fleet.offers.route(prefill_worker, request_id, job_state.num_tokens - num_cached, num_blocks)
        # The index does not expect blocks on the decode worker of a pair yet. Otherwise a request with the same prefix
        # would count as a short remainder there before any KV has arrived, and the wrong pool would compute its prompt.
        hashes = job_state.hashes(attempt.prefill_worker.block_size or 1)
        fleet.feed.expect(
            attempt.prefill_worker.worker_id, hashes, until=loop_time() + self._config.dispatch.speculative_prefix_ttl_s
        )
        return attempt

    def _elsewhere(self, job_state: JobState, besides: Member) -> Member:
        decode_workers = self._candidates(job_state).decode_pool
        candidates = decode_workers.besides((besides.worker_id,))
        if besides.worker_id in candidates.workers.places or not len(candidates):
            raise NoWorkers(f"no worker other than {besides.worker_id} can decode")
        return self._fleet.member(self._chooser.choose(job_state, candidates).decode)

    def _candidates(self, job_state: JobState) -> CandidateTable:
        fleet = self._fleet
        matched = fleet.offers.match(job_state.hashes, now=loop_time()).at_most(job_state.unread)
        return fleet.offers.suited(job_state.job, fleet.offers.candidates(matched, job_state.num_tokens))

    def _keep_revision(self, job_state: JobState) -> None:
        """Moves a job without an answer to successors after a roll, if its tokens mean the same there. Raises
        RevisionReplaced otherwise."""
        job, revisions = job_state.job, self._fleet.revisions
        if not revisions.is_gone(job.revision):
            return
        successor = None if job_state.output_ids else revisions.successor(job.revision)
        if successor is None:
            raise RevisionReplaced("the model was replaced before this answer had ended: send the request again")
        job_state.job = replace(job, revision=successor)

    # -- running -------------------------------------------------------------------------------------------------------

    async def _run(self, job_state: JobState, attempt: Attempt) -> AsyncGenerator[SequenceUpdate, None]:
        """The updates of all workers of the attempt, as one sequence. One worker computes the prompt and decodes; or
        the prefill worker computes the prompt and the first token and pushes the KV, and the decode worker computes the
        rest."""
        request_id, prefill, decode = attempt.request_id, attempt.prefill, attempt.decode
        ticket: Ticket | None = None
        answer: Updates | None = None
        arrived = finished = False
        try:
            with ExitStack() as renewing:
                if prefill is not None:
                    reservation = self._reserve(job_state, prefill, request_id, attempt.generation)
                    ticket = await decode.reserve(reservation)
                    attempt.is_reserved = True
                    renewals = renewing.enter_context(LeaseRenewal(reservation, decode, ticket.lease_s))
                pull = await self._fetch(job_state, attempt)
                job_state.read_since_s = loop_time()
                if ticket is not None:
                    job_state.record.note(
                        EventKind.RESERVED, loop_time(), worker=decode.worker_id,
                        blocks=ticket.stop - min(ticket.starts),
                    )  # fmt: skip
                updates = attempt.prefill_worker.submit(job_state.request(request_id, ticket=ticket, pull=pull))
                job_state.record.note(EventKind.SUBMITTED, loop_time(), worker=attempt.prefill_worker.worker_id)
                if ticket is None:
                    answer = updates
                else:
                    renewals.attach(updates)
                    async for update in updates:
                        if update.finish_reason is FinishReason.PREFILLED:
                            renewals.end()  # from here on KV is moved or lost
                            job_state.record.prefilled(loop_time())
                            answer = decode.submit(job_state.request(request_id, ticket=ticket, more=update.token_ids))
                            updates.forward_failures_to(answer)  # until the KV has arrived
                        else:
                            finished = update.finish_reason is not None
                        yield update
            if answer is None:
                return  # the first token was the last: `finally` gives the reservation back
            target = MigrationTarget(worker=decode, request_id=request_id, updates=answer)
            async with aclosing(self.moves.follow(job_state, target, attempt.depends_on)) as following:
                async for update in following:
                    if prefill is not None and not arrived:  # the prefill worker is done, and cannot fail any more
                        arrived = True
                        self._chooser.arrived(job_state.record)
                        prefill.abort(request_id)
                    finished = update.finish_reason is not None
                    yield update
        finally:
            if prefill is not None:
                (prefill.release if finished else prefill.abort)(request_id)
            (decode.release if finished and answer is not None else decode.abort)(request_id)
            attempt.end_pull()

    async def _fetch(self, job_state: JobState, attempt: Attempt) -> Ticket | None:
        """Fetches the attempt's pull, if there is one. The reservation of a failed pull is released at once: the
        request could otherwise wait for those blocks until the lease ends."""
        ticket = await self.pulls.fetch(job_state, attempt.pull) if attempt.pull is not None else None
        if ticket is None:
            attempt.end_pull()
        return ticket

    # -- recovering ----------------------------------------------------------------------------------------------------

    async def _recover(self, error: BatonError, job_state: JobState, attempt: Attempt | None) -> None:
        """Returns when the job can be tried again, after waiting for workers or room. Otherwise raises `error`."""
        now, config = loop_time(), self._config
        job_state.record.failed(error, now)
        job_state.failed_again()
        is_explained = isinstance(error, WorkerLost) and self._poison.are_tried
        if job_state.blocked_since_s is None or is_explained:
            job_state.blocked_since_s = now
        deadline = job_state.blocked_since_s + self._patience_s(job_state)
        refused = _is_refused(error)
        if refused:
            deadline = min(deadline, job_state.first_due_s)
        waits = refused or isinstance(error, NoWorkers | WorkerDraining | AdapterNotLoaded)
        paused = error.retryable and not waits and self._fleet.own_pauses.is_recent()  # then no worker is to blame
        # A bug, or a worker without memory: another worker may serve the request, unless its client has tokens.
        is_internal = type(error) is Internal and not job_state.output_ids
        if not (waits or error.retryable or is_internal) or isinstance(error, RevisionReplaced):
            raise error
        job_state.num_failures += 0 if waits or is_explained or paused else 1
        if now >= deadline or job_state.num_failures >= config.dispatch.max_attempts:
            error.retry_after_s = error.retry_after_s or RETRY_AFTER_S
            raise error
        if attempt is None:
            await self._fleet.offers.wait(until=deadline)
            return
        if paused:
            while any(member.is_reconnecting for member in attempt.members) and loop_time() < deadline:
                await self._fleet.offers.wait(until=deadline)
            await asyncio.sleep(config.dispatch.retry_pause_s)  # an error with another cause would repeat at once
            return
        if isinstance(error, WorkerLost) and (life := attempt.lost()) is not None:
            await self._poison.lost(
                job_state.job.request_id, job_state.crashes, life, len(job_state.output_ids),
                there_s=now - attempt.begun_s,
            )  # fmt: skip
        log.info(
            "%s resumes on another worker after %d tokens: %s", attempt.request_id, len(job_state.output_ids), error,
            extra={"request": attempt.request_id},
        )  # fmt: skip
        if refused:
            await self._wait_for_room(job_state, attempt, deadline)
            return
        job_state.failed.update(attempt.worker_ids)
        if isinstance(error, WorkerDraining | AdapterNotLoaded):  # no fault of the worker's
            await self._fleet.offers.wait(until=min(deadline, now + config.dispatch.retry_pause_s))
            return
        self.num_resumed += 1
        self._fleet.offers.blame(attempt.worker_ids)
        if job_state.num_failures > 1:  # after the first failure, other workers are ready
            await asyncio.sleep(config.dispatch.retry_pause_s * 2 ** (job_state.num_failures - 2))

    def _patience_s(self, job_state: JobState) -> float:
        """Seconds that a job waits for a worker: longer while the fleet wakes up; with tokens also longer for the
        successors of lost workers, which load their weights."""
        config = self._config
        if self._fleet.sleep.may_serve or (job_state.output_ids and len(self._fleet.successors)):
            return max(config.admission.max_queue_s, config.dispatch.successor_timeout_s)
        return config.admission.max_queue_s

    async def _wait_for_room(self, job_state: JobState, attempt: Attempt, deadline: float) -> None:
        """Returns at once if each pool has a worker that has not refused the job. Otherwise jobs wait in line, and each
        change of a load lets one of them try again, so that a full pool is not flooded with requests."""
        job_state.full.add(attempt.refuser.worker_id)
        offered = self._fleet.offers.suited(job_state.job, self._fleet.offers.candidates(NO_MATCH, 1))
        pools = [set(pool.workers.worker_ids) for pool in (offered.prefill_pool, offered.decode_pool) if len(pool)]
        if pools and all(pool - job_state.full for pool in pools):
            return
        job_state.full.clear()
        self._fleet.offers.num_turned_away += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline), self._line:
                    await self._fleet.offers.wait(
                        until=min(deadline, loop_time() + self._config.dispatch.retry_pause_s)
                    )
        finally:
            self._fleet.offers.num_turned_away -= 1


def _is_refused(error: BatonError) -> bool:
    """Whether a worker refused the attempt and nothing was lost: no room, or a lane in quarantine."""
    return isinstance(error, Overloaded) or (isinstance(error, TransferFailed) and error.retry_after_s is not None)


class LeaseRenewal:
    """Renews a reservation until `end`, while its prefix is fetched and its prompt waits and is computed. If a renewal
    fails, the attached updates of the prefill worker fail with TransferFailed."""

    def __init__(self, request: ReserveRequest, decode: Member, lease_s: float) -> None:
        self._reading: Updates | None = None
        self._failure: TransferFailed | None = None
        renewing = self._renew(request, decode, lease_s)
        self._task: asyncio.Task[None] | None = asyncio.create_task(renewing, name=f"renewals of {request.request_id}")

    def __enter__(self) -> LeaseRenewal:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def attach(self, updates: Updates) -> None:
        self._reading = updates
        if self._failure is not None:
            updates.fail(self._failure)

    def end(self) -> None:
        """Cancels the task and drops the reference to it. The cancelled task holds a frame that holds this object and
        the prompt: the cycle would outlive reference counting."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _renew(self, request: ReserveRequest, decode: Member, lease_s: float) -> None:
        try:
            while True:
                await asyncio.sleep(lease_s / RENEWALS_A_LEASE)
                await decode.renew(request)
        except BatonError as error:
            self._failure = TransferFailed(
                f"worker {decode.worker_id} did not renew the reservation of {request.request_id}: {error.message}"
            )
            if self._reading is not None:
                self._reading.fail(self._failure)
