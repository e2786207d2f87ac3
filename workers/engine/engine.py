"""The engine: takes requests, steps, tells what each step did. It has no role of its own: pools compose it with one.

    depth 0   plan n   launch n   fetch n   apply n            the device waits while the host plans and tells
    depth 1   plan n+1 launch n+1 fetch n   apply n            the host does both while the device computes n+1

Not thread-safe: one thread owns an engine, its role and its blocks, and calls everything here (`workers.rpc.loop`).
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.events import EventLog
from kvtransfer.hashing import Remembering
from protos.errors import ContextLengthExceeded, InvalidRequest, Overloaded, UnknownRequest, WorkerDraining
from protos.values import (
    FinishReason,
    GenerateRequest,
    Hello,
    KVEvents,
    MoveRequest,
    SequenceUpdate,
    ShareRequest,
    WorkerLoad,
)
from protos.wire import error_info
from workers.batch import Awaited, Batch, Pending, Pipeline, Repeating, Runner, StepOutput, Timed, pipeline
from workers.grammar.base import Grammars
from workers.kv.blocks import BlockPool
from workers.scheduling.scheduler import Scheduler
from workers.timeline import Timeline

LOOK_S = 0.0002
"""How often KV that is behind is looked after while a step is waited for."""


class Pace:
    """How fast steps have been lately: older ones count less, each by a tenth than the one after it.

    The first step of a kind does not count: memory is touched and code is loaded in it that later ones find there. Nor
    do a few prompt tokens: what any step costs is most of their time, and would be taken for the speed of long prompts.
    """

    _KEEP = 0.9
    _LEAST_PREFILL = 32

    def __init__(self) -> None:
        self._is_cold = {"prefill": True, "decode": True}
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._decode_steps = 0.0
        self._decode_s = 0.0

    def observe(self, batch: Batch, elapsed_s: float) -> None:
        """A mixed step's time is shared out by tokens to prefill, and counts in full as a decode step: that is how
        long the decoding clients waited."""
        num_tokens = batch.num_tokens
        num_prefill = num_tokens - sum(row.num_tokens == 1 for row in batch.rows)
        if num_prefill and self._counts("prefill") and num_prefill >= self._LEAST_PREFILL:
            self._prefill_tokens = self._prefill_tokens * self._KEEP + num_prefill
            self._prefill_s = self._prefill_s * self._KEEP + elapsed_s * num_prefill / num_tokens
        if num_prefill < num_tokens:
            self.decoded(elapsed_s)

    def decoded(self, elapsed_s: float) -> None:
        """A step that decoded."""
        if self._counts("decode"):
            self._decode_steps = self._decode_steps * self._KEEP + 1
            self._decode_s = self._decode_s * self._KEEP + elapsed_s

    def num_steady(self, steps_s: Sequence[float]) -> int:
        """How many steps of these times until `told_step_s` changes, that one included; all of them if it does not."""
        steps, seconds, told_s = self._decode_steps, self._decode_s, self.told_step_s
        num_cold = int(self._is_cold["decode"])
        for number, elapsed_s in enumerate(steps_s[num_cold:], num_cold + 1):
            steps, seconds = steps * self._KEEP + 1, seconds * self._KEEP + elapsed_s
            if _rounded(seconds / steps) != told_s:
                return number
        return len(steps_s)

    def _counts(self, kind: str) -> bool:
        was_cold, self._is_cold[kind] = self._is_cold[kind], False
        return not was_cold

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 until measured."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """0 until measured."""
        return self._decode_s / self._decode_steps if self._decode_steps else 0.0

    @property
    def told_step_s(self) -> float:
        """`decode_step_s` to a sixtieth: what hardly changes from step to step is not told with every one,
        and whoever routes by it has nothing to work out anew."""
        return _rounded(self.decode_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    batch: Batch
    pending: Pending
    start_s: float


class Engine:
    """`events` must be what the scheduler's pool records to. `clock` times the runner and, while it
    records, `timeline`; and what moves while a step is waited for, so it must be that of `now`.

    `depth` steps are in flight when `step` returns, if there is enough to do: 0 for a runner that computes while it
    launches, 1 for a device that computes by itself. Tokens are the same at any depth. `grammars` are the runner's;
    without them requests that have one are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner | Pipeline,
        *,
        events: EventLog,
        clock: Callable[[], float],
        depth: int = 0,
        timeline: Timeline | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._pipeline = pipeline(runner)
        self._repeating = self._pipeline if isinstance(self._pipeline, Repeating) else None
        self._depth = depth
        self._in_flight: deque[_Launched] = deque()
        self._fetched_s = 0.0
        self._role = scheduler.role
        self._events = events
        self._clock = clock
        self._pace = Pace()
        self._num_drained = 0
        self.num_steps = 0
        self.draining = False
        self.timeline = timeline or Timeline(clock)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def pool(self) -> BlockPool:
        """For a role that reserves blocks: between two steps, and not while `scheduler.blocked`."""
        return self._scheduler.pool

    def submit(self, request: GenerateRequest, now: float) -> None:
        """Takes a request. Raises WorkerDraining, InvalidRequest, ContextLengthExceeded or Overloaded, and nothing has
        happened. A request whose ticket is out is taken however many wait, and one that has blocks reserved here also
        while this worker drains: it moves on from here with its KV."""
        if self.draining and not self._role.promised(request):
            raise WorkerDraining("this worker is draining and takes no new requests: send them to another one")
        if request.request_id in self._scheduler:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use on this worker: every attempt needs one of its own",
                param="request_id",
            )
        self._check_tokens(request)
        self._check_length(request)
        if request.ticket is None:
            self._check_room()
        if request.sampling.grammar:
            self._begin(request)
        self._scheduler.add(request, now)

    def abort(self, request_ids: Collection[str]) -> int:
        """How many of them were known, be it as a reservation only. Their blocks are free when this returns, unless a
        step in flight computes them or a transfer still reads them."""
        known: list[str] = []
        unknown: list[str] = []  # in order: a simulated run must not depend on how strings hash
        for request_id in dict.fromkeys(request_ids):
            (known if request_id in self._scheduler else unknown).append(request_id)
        if self._grammars is not None:
            self._grammars.release(known)
        return self._scheduler.abort(known) + sum(self._role.withdraw(request_id) for request_id in unknown)

    def move(self, asked: MoveRequest, now: float) -> None:
        """A request is to go on where the ticket is; `step` says when it has moved, or that it stays. Raises
        UnknownRequest, or InvalidRequest on a worker without lanes."""
        request = self._scheduler.find(asked.request_id)
        if request is None:
            raise UnknownRequest(f"request {asked.request_id} is not here", param="request_id")
        self._role.move(request, asked.ticket, now)

    def share(self, asked: ShareRequest, now: float) -> int:
        """Pushes cached blocks to a ticket, those of the host after they have been loaded: how many of its blocks they
        are. Sequences keep room to grow into. Raises as `Role.share` does."""
        num_running, num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        at_once = not num_running and not self._in_flight
        coming = self._scheduler.loads.fetch(asked.hashes, headroom=num_running + num_waiting, at_once=at_once)
        return self._role.share(asked.ticket, asked.hashes, now, coming)

    def step(self, now: float) -> list[SequenceUpdate]:
        """Launches the next step and tells what the one `depth` before it did; without a next one, the oldest."""
        with self.timeline.span("tick"):
            updates = self._tick(now)
        with self.timeline.span("plan"):
            batch = self._scheduler.plan(now, self._grammars.late() if self._grammars is not None else ())
        if batch is not None:
            self._launch(batch, now)
        if self._in_flight and (batch is None or len(self._in_flight) > self._depth):
            oldest = self._in_flight.popleft()
            output = self._fetch(oldest)
            with self.timeline.span("apply", oldest.batch, step=self.num_steps):
                updates += self._scheduler.apply(oldest.batch, output)
        if self._grammars is not None and len(self._grammars):
            self._prepare_masks(self._grammars, updates)
        return updates

    def num_alike(self, last: Batch) -> int:
        """How many of the next steps only decode a token for each running sequence, so that all but the tokens and the
        step's number stays as it is, unless something comes from outside or the role has something to do."""
        return self._scheduler.num_alike(last) if len(self._in_flight) <= 1 else 0

    def num_steady(self, steps_s: Sequence[float]) -> int:
        """How many steps that take so long until the load tells of another pace, that one included."""
        return self._pace.num_steady(steps_s)

    def repeat(self, num_steps: int) -> list[SequenceUpdate]:
        """Takes steps that are alike (`num_alike`) at once, on a pipeline that can: all is then as if `step` had been
        called so often, and what was to be told comes in one update for each sequence."""
        assert self._repeating is not None
        taken = self._scheduler.take(num_steps)
        done = self._repeating.repeat(num_steps, in_flight=bool(self._in_flight), taken=taken)
        for elapsed_s in done.steps_s:
            self._pace.decoded(elapsed_s)
        if done.pending is not None:
            self._in_flight[0] = _Launched(batch=done.batch, pending=done.pending, start_s=done.launched_s)
        self._fetched_s = self._clock()
        self.num_steps += num_steps
        return self._scheduler.repeat(done)

    def has_work(self) -> bool:
        """Must `step` go on being called? It may still find nothing to compute: then `num_steps` stays the same and
        `num_in_flight` is 0."""
        return bool(self._in_flight) or self._scheduler.has_requests() or self._role.busy()

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not told of."""
        return len(self._in_flight)

    def listen(self, wake: Callable[[], None]) -> None:
        """Has it called, from any thread, when what a request waited for is there: `step` may find something to do."""
        if self._grammars is not None:
            self._grammars.listener = wake

    def drain(self) -> None:
        """From now on takes no new requests; those taken are served to their end."""
        self.draining = True

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            step=self.num_steps,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            queued_prefill_tokens=self._scheduler.queued_prefill_tokens,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            prefill_tokens_per_s=self._pace.prefill_tokens_per_s,
            decode_step_s=self._pace.told_step_s,
            draining=self.draining,
            host=self.pool.host.load() if self.pool.host is not None else None,
            **self._role.load(),
        )

    def events_since(self, hello: Hello) -> KVEvents:
        """What a gateway has missed: the events themselves, or a snapshot if they are no longer kept."""
        return self._events.since(hello.incarnation, hello.next_seq) or self._events.snapshot(self.pool.snapshot())

    def drain_events(self) -> KVEvents | None:
        """The events since the last call, each once; None if there are none."""
        if self._num_drained == self._events.next_seq:
            return None
        events = self._events.since(self._events.incarnation, self._num_drained)
        self._num_drained = self._events.next_seq
        return events or self._events.snapshot(self.pool.snapshot())

    def check_integrity(self, reserved_ids: Sequence[int] = ()) -> None:
        self._scheduler.check_integrity(reserved_ids)

    def written_ids(self) -> Iterator[int]:
        """Blocks that steps in flight write."""
        size = self._scheduler.pool.block_size
        for launched in self._in_flight:
            for row in launched.batch.rows:
                yield from row.block_ids[row.start // size : -(-row.stop // size)]

    def assert_idle(self) -> None:
        """Nothing runs, nothing moves, no block and no grammar is held."""
        assert not self._role.busy()
        assert self._grammars is None or not len(self._grammars)
        self._scheduler.assert_idle()

    def _tick(self, now: float) -> list[SequenceUpdate]:
        tick = self._role.tick(now, len(self._in_flight))
        updates = [
            SequenceUpdate(request_id=request_id, finish_reason=FinishReason.MOVED)
            for request_id in tick.moved
            if self._scheduler.hold(request_id)
        ]
        updates += [
            SequenceUpdate(request_id=request_id, error=error_info(error))
            for request_id, error in tick.stayed
            if request_id in self._scheduler
        ]
        for request_id in tick.released:
            self._scheduler.release(request_id)
        updates += [
            SequenceUpdate(request_id=request_id, finish_reason=FinishReason.ERROR, error=error_info(error))
            for request_id, error in tick.failed
            if self._scheduler.release(request_id)
        ]
        return updates

    def _launch(self, batch: Batch, now: float) -> None:
        depth = len(self._in_flight)
        with self.timeline.span("launch", batch, step=self.num_steps + depth + 1, depth=depth):
            self._role.launching(batch, now)
            start_s = self._clock()
            self._in_flight.append(_Launched(batch=batch, pending=self._pipeline.launch(batch), start_s=start_s))

    def _fetch(self, launched: _Launched) -> StepOutput:
        """Its time counts from when the step before it was over."""
        step = self.num_steps + 1
        with self.timeline.span("fetch", launched.batch, step=step):
            self._wait(launched)
            output = launched.pending.fetch()
        start_s, self._fetched_s = max(launched.start_s, self._fetched_s), self._clock()
        self._pace.observe(launched.batch, self._fetched_s - start_s)
        self._scheduler.loads.prefill_tokens_per_s = self._pace.prefill_tokens_per_s
        if self.timeline.recording:
            pending, seen = launched.pending, (start_s, self._fetched_s)
            start_s, end_s = (pending.device_span() if isinstance(pending, Timed) else None) or seen
            self.timeline.add("device", start_s, end_s, launched.batch, step=step, depth=len(self._in_flight))
        self.num_steps = step
        return output

    def _wait(self, launched: _Launched) -> None:
        """KV that found no room on its lane goes on its way while the device computes: a step that reads a prompt takes
        longer than what a lane has staged. Others are not looked at so often, lest it costs them time."""
        pending, role = launched.pending, self._role
        if not launched.batch.reads_prompts or not isinstance(pending, Awaited):
            return
        while role.is_behind() and not pending.is_over():
            role.go_on(self._clock(), 1 + len(self._in_flight))
            time.sleep(LOOK_S)

    def _begin(self, request: GenerateRequest) -> None:
        """Its grammar is compiled from now on: it is admitted when its first token can be chosen."""
        if self._grammars is None:
            raise InvalidRequest("this worker cannot constrain answers", param="grammar")
        if request.sampling.ignore_eos:
            raise InvalidRequest(
                "ignore_eos and a grammar exclude each other: it says where to end", param="ignore_eos"
            )
        self._grammars.begin(request.request_id, request.sampling.grammar, request.output_ids)

    def _prepare_masks(self, grammars: Grammars, updates: Sequence[SequenceUpdate]) -> None:
        """What may follow the tokens of this step is made beside the next one."""
        grammars.release([update.request_id for update in updates if update.finish_reason is not None])
        for update in updates:
            request = self._scheduler.find(update.request_id) if update.token_ids else None
            if request is not None and request.sampling.grammar and update.finish_reason is None:
                grammars.begin(request.request_id, request.sampling.grammar, tuple(request.output_ids))

    def _check_room(self) -> None:
        limit = self._scheduler.config.max_waiting
        if self._scheduler.num_waiting >= limit:
            speed = self._pace.prefill_tokens_per_s
            raise Overloaded(
                f"{self._scheduler.num_waiting} requests wait to begin on this worker, as many as max_waiting allows",
                retry_after_s=self._scheduler.queued_prefill_tokens / limit / speed if speed else None,
            )

    def _check_tokens(self, request: GenerateRequest) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
        vocab_size = self._scheduler.config.vocab_size
        sampling = request.sampling
        for param, token_ids in (
            ("prompt", request.prompt_ids),
            ("output_ids", request.output_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias)),
        ):
            if token_ids and not _are_ids(token_ids, vocab_size):
                wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
                raise InvalidRequest(
                    f"{param} holds token id {wrong}: the model's ids are 0 to {vocab_size - 1}", param=param
                )

    def _check_length(self, request: GenerateRequest) -> None:
        num_given, max_tokens = len(request.output_ids), request.sampling.max_tokens
        if max_tokens < 0 or (num_given > 0 and num_given >= max_tokens):
            raise InvalidRequest(
                f"max_tokens is {max_tokens} and {num_given} output tokens are given: nothing is left to generate",
                param="max_tokens",
            )
        num_tokens, limit = len(request.prompt_ids) + num_given, self._scheduler.max_len
        if num_tokens + (max_tokens > 0) > limit:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens: this worker holds at most {limit} of prompt and answer, "
                f"so {limit - 1} at most of the prompt",
                param="prompt",
            )


def _are_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Is each from 0 to below `vocab_size`?"""
    if not isinstance(token_ids, Remembering):
        return _are_below(token_ids, vocab_size)
    if vocab_size not in token_ids.are_below:
        token_ids.are_below[vocab_size] = _are_below(token_ids, vocab_size)
    return token_ids.are_below[vocab_size]


def _are_below(token_ids: Sequence[int], vocab_size: int) -> bool:
    """In a third of the time that `min` and `max` take of a long prompt."""
    try:
        ids = array("I", tuple(token_ids))  # a plain one: `array` asks any other sequence for each of its items
        return int(np.frombuffer(ids, dtype=np.uintc).max()) < vocab_size
    except OverflowError:
        return False


def _rounded(seconds: float) -> float:
    """To six binary digits."""
    mantissa, exponent = math.frexp(seconds)
    return math.ldexp(round(mantissa * 64), exponent - 6)
