"""Admits jobs to the fleet in a fair order, no faster than it can start them, and refuses early those that would be
late.

    job ─▶ too late already? ─▶ room, empty queue ────────────────────────────▶ dispatch
                │                   └─▶ queue (fair, bounded) ─▶ its turn, room ─▶ dispatch
                ▼                              ▼
             429 + Retry-After         429 at once: the queue is full, or too long for its measured rate; before its
                                       stream begins: the rate has fallen; later: its deadline has passed

Workers are kept supplied, not flooded (`Room`): a job that waits here can still be reordered, refused or given to
another worker. Lives on one event loop, whose clock it uses; it has no start and no stop.

A job waits while its turn is expected (`Turnover`) within `SURE` of the rest of its `max_queue_s`. That is decided on
arrival, and once more just before its stream's first comment, which needs the status 200. A job that passes the second
check, streamed or not, may wait for `max_queue_s` longer: its turn is near.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from protos.errors import InvalidRequest, Overloaded
from protos.event_loop import loop_time
from protos.values import BlockHash
from router.admission.fair_queue import Entry, FairQueue
from router.admission.retry_queue import LEAST_MEASURED_S, Returning
from router.admission.time_and_room import Overrun, Room, is_idle, least_ttft_s, predicted_ttft_s, prefill_speed
from router.admission.turnover import Turnover
from router.jobs import Generate, Job, TokenDelta
from router.prefix.index import Match
from router.router_config import RouterConfig
from router.routing.candidate_columns import CandidateTable

LEAST_RETRY_S = 0.1
SURE = 0.8  # share of the time left: the rate may fall a little
CHECK_AT = 0.9  # share of `keep_alive_s`, after which the first comment is due
HEADROOM = 0.02  # share of a bound: a prediction at the bound itself is late one time in two
TOO_LATE = "no worker could start this request within its max_ttft_ms"


class IdleFleet(Protocol):
    """The methods of the fleet that admission of batches uses (`router.fleet.fleet.Fleet`)."""

    gateway_id: str

    @property
    def block_size(self) -> int | None: ...
    @property
    def num_turned_away(self) -> int: ...
    def candidates(self, matched: Match, num_tokens: int) -> CandidateTable: ...
    async def wait(self, *, until: float) -> None: ...


class AdmissionFleet(IdleFleet, Protocol):
    def match(self, hashes: Callable[[int], Sequence[BlockHash]], *, now: float) -> Match: ...
    def loads(self) -> CandidateTable: ...
    def overhead_s(self) -> float: ...


@dataclass(slots=True)
class Refused:
    deadline_unreachable: int = 0  # predicted on arrival, with the present load
    deadline_impossible: int = 0  # predicted on arrival, even for idle workers
    queue_timeout: int = 0  # not started in time
    queue_full: int = 0
    queue_too_long: int = 0  # predicted: the measured rate does not start it within `max_queue_s`


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A job in the queue. `came` gets the outcome of its wait, at most `timeout` long."""

    job: Job
    came: asyncio.Future[None]
    timeout: asyncio.Timeout

    @property
    def latest_s(self) -> float:
        return self.timeout.when() or 0.0


class Admission:
    """Wraps a `Generate` with the queue. `num_waiting` and `refused` are for metrics."""

    def __init__(
        self,
        generate: Generate,
        *,
        fleet: AdmissionFleet,
        config: RouterConfig,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._generate = generate
        self._fleet = fleet
        self._config = config
        self._room = Room(max_backlog_s=config.admission.max_backlog_s, max_waiting=config.admission.max_backlog)
        self._line = FairQueue(weights)
        self._overrun = Overrun()
        self._returning = Returning(weights)
        self._turnover = Turnover()
        self._waiting_since_s = 0.0
        self._turns: dict[int, Turn] = {}
        self._numbers = count()
        self._watching: asyncio.Task[None] | None = None
        self.refused = Refused()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def served(self, tenant: str) -> float:
        return self._line.served(tenant)

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._line.weigh(weights)
        self._returning.weigh(weights)

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        """Raises Overloaded, with the seconds after which to retry, before the first delta. Otherwise behaves as
        `Generate`."""
        entry = self._entry(job)
        job, expected_s = await self._enter(job, entry)
        # Charged before it is served: otherwise all queued jobs of one tenant would go before its first prompt is
        # prefilled.
        self._line.charge(job.tenant, num_input=len(job.prompt_ids))
        let_s, num_output, has_begun = loop_time(), 0, False
        self._turnover.begin(entry.number, job.sampling.max_tokens, now=let_s)
        try:
            deltas = self._generate(job)
            try:
                async for delta in deltas:
                    num_found = 0
                    if not has_begun and delta.token_ids:
                        has_begun = True
                        self._returning.read(len(job.prompt_ids), now=loop_time())
                        num_found = delta.num_cached_tokens  # they cost no computing
                    if expected_s is not None and delta.token_ids:
                        now = loop_time()
                        self._overrun.observe(now - let_s - expected_s, predicted_s=expected_s, now=now)
                        expected_s = None
                    num_output += len(delta.token_ids)
                    self._turnover.num_output += len(delta.token_ids)
                    self._line.charge(job.tenant, num_input=-num_found, num_output=len(delta.token_ids))
                    yield delta
            finally:
                await deltas.aclose()
        except Overloaded as error:  # an admitted job that found no room and has no token
            error.retry_after_s = max(error.retry_after_s or 0.0, self._measured_s(self._again(entry))) or None
            raise
        finally:
            self._turnover.end(entry.number, job.sampling.max_tokens, num_output, now=loop_time())

    def _entry(self, job: Job) -> Entry:
        return Entry(
            number=next(self._numbers),
            tenant=job.tenant,
            priority=job.priority,
            num_tokens=len(job.prompt_ids),
            deadline_s=math.inf if job.max_ttft_s is None else loop_time() + job.max_ttft_s,
        )

    def _again(self, entry: Entry) -> Entry:
        return replace(entry, number=next(self._numbers), deadline_s=math.inf)

    async def _enter(self, job: Job, entry: Entry) -> tuple[Job, float | None]:
        """Returns when it is the job's turn, with the seconds of its prefill if it has a deadline. The deadline counts
        from the job's arrival, not from its turn."""
        now = loop_time()
        if job.max_ttft_s is not None:
            job = replace(job, due_s=entry.deadline_s)
        prefill_s = self._check_hope(job, entry, now)
        if not self._line and self._has_room(entry):
            return job, prefill_s
        if not self._line:
            self._waiting_since_s = now
            self._turnover.form_queue(now)
        self._line.push(entry)
        loop, config = asyncio.get_running_loop(), self._config
        latest_s, check_s = now + config.admission.max_queue_s, now + CHECK_AT * config.http.keep_alive_s
        turn = self._turns[entry.number] = Turn(job, loop.create_future(), asyncio.timeout_at(latest_s))
        self._bound(entry)
        last_check = loop.call_at(check_s, self._check_again, turn, entry) if check_s < latest_s else None
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="admission")
        try:
            async with turn.timeout:
                await turn.came
        except TimeoutError:
            self.refused.queue_timeout += 1
            why = f"no worker could start this request within {turn.latest_s - now:g} s"
            raise self._overloaded(why, entry) from None
        finally:
            if last_check is not None:
                last_check.cancel()
            self._turns.pop(entry.number, None)
            self._line.remove(entry)
        return job, self._prefill_s(job, loop_time()) if job.max_ttft_s is not None else None

    def check_integrity(self) -> None:
        self._line.check_integrity()
        self._returning.check_integrity()
        due = {entry.number for entry in self._line}
        undone = {number for number, turn in self._turns.items() if not turn.came.done()}
        assert due <= self._turns.keys(), f"{sorted(due - self._turns.keys())} are in line who have gone"
        assert undone <= due, f"{sorted(undone - due)} wait for a turn, and are not in line"

    def assert_idle(self) -> None:
        assert not self._line, f"{len(self._line)} are in line who have gone"
        assert not self._turns, f"turns are kept of {len(self._turns)} who have gone"

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _check_hope(self, job: Job, entry: Entry, now: float) -> float | None:
        if job.max_ttft_s is None:
            return None
        candidates, num_tokens, overhead_s = self._candidates(job, now), len(job.prompt_ids), self._fleet.overhead_s()
        least_s = least_ttft_s(candidates, num_tokens, overhead_s=overhead_s)
        if least_s is not None and least_s > job.max_ttft_s:
            self.refused.deadline_impossible += 1
            raise InvalidRequest(
                f"max_ttft_ms is {job.max_ttft_s * 1000:g}: even without other requests the first token of this prompt "
                f"({num_tokens} tokens) would come after about {math.ceil(least_s * 1000)} ms; allow more than that",
                param="max_ttft_ms",
            )
        num_ahead = self._line.tokens_ahead(entry)
        prefill_s = predicted_ttft_s(candidates, num_tokens, num_ahead, overhead_s=overhead_s)
        if prefill_s is None or (not num_ahead and is_idle(candidates)):
            # No other work delays the job, so coming later would not help: it is admitted, because it may be in time.
            return prefill_s
        predicted_s = prefill_s + self._overrun.of(prefill_s, now=now)
        if predicted_s <= job.max_ttft_s:
            return prefill_s
        self.refused.deadline_unreachable += 1
        raise Overloaded(
            f"the first token would come after about {predicted_s:.3g} s, later than the {job.max_ttft_s:g} s that "
            "max_ttft_ms allows: try again later, or allow more",
            param="max_ttft_ms",
            retry_after_s=self._retry_s(predicted_s - job.max_ttft_s, entry, candidates),
        )

    def _too_late(self, entry: Entry, now: float) -> Overloaded | None:
        turn = self._turns.get(entry.number)
        if turn is None or entry.deadline_s == math.inf:
            return None
        prefill_s = self._prefill_s(turn.job, now)
        # The job is assumed to be as late as recent jobs were.
        latest_s = entry.deadline_s - HEADROOM * (turn.job.max_ttft_s or 0.0)
        if prefill_s is None or now + prefill_s + self._overrun.of(prefill_s, now=now) <= latest_s:
            return None
        self.refused.queue_timeout += 1
        return self._overloaded(TOO_LATE, entry)

    def _prefill_s(self, job: Job, now: float) -> float | None:
        overhead_s = self._fleet.overhead_s()
        return predicted_ttft_s(self._candidates(job, now), len(job.prompt_ids), 0, overhead_s=overhead_s)

    def _candidates(self, job: Job, now: float) -> CandidateTable:
        fleet = self._fleet
        return fleet.candidates(fleet.match(job.hashes, now=now), len(job.prompt_ids))

    def _bound(self, entry: Entry) -> None:
        """Refuses jobs that would not be served in time, now that `entry` waits: the last job of a full queue; at the
        measured rate `entry`, or the last job, which `entry` pushes back."""
        limits, last = self._config.admission, self._line.last()
        assert last is not None
        if len(self._line) > limits.max_queued:
            self.refused.queue_full += 1
            why = f"{limits.max_queued} requests wait before this one, as many as may"
            self._answer(last, self._overloaded(why, last))
        elif not self._refuse_late(entry) and last is not entry:
            self._refuse_late(last)

    def _check_again(self, turn: Turn, entry: Entry) -> None:
        if not (turn.came.done() or self._refuse_late(entry)):
            turn.timeout.reschedule(turn.latest_s + self._config.admission.max_queue_s)

    def _refuse_late(self, entry: Entry) -> bool:
        now, turn = loop_time(), self._turns[entry.number]
        if not (self._is_measured(now) and self._turnover.is_sure):
            return False
        wait_s, left_s = self._turn_s(entry, now), SURE * (turn.latest_s - now)
        if not left_s < wait_s < math.inf:
            return False
        self.refused.queue_too_long += 1
        why = (
            f"at the present rate this request would begin in {wait_s:.3g} s, and only what begins in {left_s:.3g} s "
            f"is sure to within {turn.latest_s - now:.3g} s, when its wait ends: try again later"
        )
        self._answer(entry, Overloaded(why, retry_after_s=self._retry_s(wait_s - left_s, entry, self._fleet.loads())))
        return True

    def _overloaded(self, why: str, entry: Entry) -> Overloaded:
        candidates, again = self._fleet.loads(), self._again(entry)
        measured_s = self._measured_s(again)
        self._line.remove(entry)
        wait_s = predicted_ttft_s(candidates, 0, self._line.tokens_ahead(again))
        if wait_s is None:
            return Overloaded(why, retry_after_s=measured_s or None)
        return Overloaded(why, retry_after_s=self._retry_s(max(wait_s, measured_s), entry, candidates))

    def _is_measured(self, now: float) -> bool:
        """Whether the queue is old enough to measure; before, a few long answers make all seem long."""
        return now - self._waiting_since_s >= LEAST_MEASURED_S

    def _speed(self, now: float) -> float:
        return self._turnover.at(now) * self._line.mean_tokens

    def _turn_s(self, entry: Entry, now: float) -> float:
        speed = self._speed(now)
        return self._line.tokens_ahead(entry) / speed if speed else math.inf

    def _measured_s(self, entry: Entry) -> float:
        now = loop_time()
        if not self._line or not self._is_measured(now):
            return 0.0
        return min(self._config.admission.max_queue_s, self._turn_s(entry, now))

    def _retry_s(self, wait_s: float, entry: Entry, candidates: CandidateTable) -> float:
        now = loop_time()
        speed = min(filter(None, (prefill_speed(candidates), self._speed(now))), default=0.0)
        behind_s = self._returning.after_s(entry, speed=speed, now=now)
        return max(LEAST_RETRY_S, wait_s, min(wait_s + behind_s, self._config.admission.max_queue_s))

    # -- admitting -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        try:
            while self._line:
                self._move()
                pause_s = self._config.dispatch.retry_pause_s
                await self._fleet.wait(until=min(loop_time() + pause_s, self._line.next_deadline_s()))
        finally:
            self._watching = None

    def _move(self) -> None:
        now = loop_time()
        for entry in self._line.late(now):
            self.refused.queue_timeout += 1
            self._answer(entry, self._overloaded(TOO_LATE, entry))
        head = self._line.peek()
        if head is not None and self._has_room(head):
            self._answer(head, self._too_late(head, now))
            # One job at a time: the job runs before the next call, so its decision already counts as load.
            asyncio.get_running_loop().call_soon(self._move)

    def _answer(self, entry: Entry, error: Overloaded | None) -> None:
        self._line.remove(entry)
        turn = self._turns.get(entry.number)
        if turn is None or turn.came.done():
            return
        if error is None:
            turn.came.set_result(None)
        else:
            turn.came.set_exception(error)

    def _has_room(self, entry: Entry) -> bool:
        if self._fleet.num_turned_away:  # jobs that were admitted before have found no room
            return False
        num_blocks = -(-entry.num_tokens // (self._fleet.block_size or 1))
        return self._room.fits(self._fleet.loads(), num_blocks)
