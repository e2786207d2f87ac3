"""The engine accepts requests, takes steps, and reports each step's updates. It has no role: pools compose it.

    depth 0   plan n   launch n   fetch n   apply n            the device waits while the host plans and publishes
    depth 1   plan n+1 launch n+1 fetch n   apply n            the host does both while the device computes n+1

A launch queues the forward pass and the sampling. Not thread-safe: one thread owns an engine, its role and its blocks,
and calls everything here (`workers.rpc.loop`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvtransfer.events import EventLog
from protos.errors import AdapterNotLoaded, InvalidRequest, Overloaded, UnknownRequest, WorkerDraining
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
from workers.batch import (
    Batch,
    DeviceTimedStep,
    PendingStep,
    Pipeline,
    PollableStep,
    ProlongableStep,
    StepOutput,
)
from workers.engine.request_checks import check_length, check_tokens
from workers.engine.served_adapters import ServedAdapters
from workers.engine.speed import EngineSpeed
from workers.grammar.grammar_seam import Grammars
from workers.kv.block_pool import BlockPool
from workers.parallel.expert_placement import ExpertImbalance
from workers.scheduling.role import Role, Tick
from workers.scheduling.scheduler import Scheduler
from workers.timeline import Timeline

POLL_S = 0.0002
"""How often transfers advance while the engine waits for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    batch: Batch
    pending: PendingStep
    start_s: float


class Engine:
    """`events` must be the log that the scheduler's pool records to. `clock` times steps, spans of `timeline`, and
    transfers while the engine waits for a step, so it must be the clock of `now`.

    `depth` steps are in flight when `step` returns, if there is enough to do: 0 for a runner that computes while it
    launches, 1 for a device that computes by itself. Tokens are the same at any depth. `grammars` are the runner's;
    without them requests that have one are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        *,
        events: EventLog,
        clock: Callable[[], float],
        depth: int = 0,
        timeline: Timeline | None = None,
        grammars: Grammars | None = None,
        expert_imbalance: Callable[[], ExpertImbalance] | None = None,
        adapters: ServedAdapters | None = None,
    ) -> None:
        self.adapters = adapters
        self._expert_imbalance = expert_imbalance
        self._grammars = grammars
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._row_limits = pipeline.row_limits
        if scheduler.speculation is not None:
            scheduler.speculation.limit(self._row_limits.num_drafts)
        self._depth = depth
        self._in_flight: deque[_Launched] = deque()
        self._fetched_s = 0.0
        self._role = scheduler.role
        self._events = events
        self._clock = clock
        self.speed = EngineSpeed()
        self._num_drained = 0
        self.num_steps = 0
        self._num_output_tokens = 0
        self.draining = False
        self.retiring = False
        self.timeline = timeline or Timeline(clock)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def role(self) -> Role:
        return self._role

    @property
    def pool(self) -> BlockPool:
        """A role may reserve blocks of it between two steps, and not while `scheduler.blocked`."""
        return self._scheduler.pool

    def submit(self, request: GenerateRequest, now: float) -> None:
        """Accepts a request, or raises WorkerDraining, InvalidRequest, ContextLengthExceeded or Overloaded without any
        effect. `max_waiting` does not apply to a request with a ticket. A request with reserved blocks is accepted
        while this worker drains, too: it migrates from here with its KV."""
        if self.draining and not self._role.has_reservation(request):
            raise WorkerDraining("this worker is draining and takes no new requests: send them to another one")
        if request.request_id in self._scheduler:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use: give each attempt its own", param="request_id"
            )
        check_tokens(request, self._scheduler.config.vocab_size)
        check_length(request, self._scheduler.max_len)
        if request.adapter:
            self._check_adapter(request.adapter)
        if request.ticket is None:
            self._check_room()
        if request.sampling.grammar:
            self._begin(request)
        self._scheduler.add(request, now)

    def abort(self, request_ids: Collection[str]) -> int:
        """Ends requests and reservations, and returns how many existed here. Their blocks are free after that, unless a
        step in flight computes them or a transfer still reads them."""
        names: list[str] = []
        unknown: list[str] = []  # in order: a simulated run must not depend on hashes of strings
        for request_id in dict.fromkeys(request_ids):
            (names if request_id in self._scheduler else unknown).append(request_id)
        if self._grammars is not None:
            self._grammars.release(names)
        return self._scheduler.abort(names) + sum(self._role.withdraw(request_id) for request_id in unknown)

    def migrate(self, move: MoveRequest, now: float) -> None:
        """Begins to migrate a request to the ticket's worker; a later `step` returns that it has moved or stays.
        Raises UnknownRequest, or InvalidRequest on a worker without lanes."""
        request = self._scheduler.find(move.request_id)
        if request is None:
            raise UnknownRequest(f"this worker has no request {move.request_id!r}, or it has ended", param="request_id")
        self._role.migrate(request, move.ticket, now)

    def share(self, request: ShareRequest, now: float) -> int:
        """Pushes cached blocks to a ticket, those on the host once they are loaded, and returns their number. Leaves
        each sequence a block to grow into. Raises as `Role.share` does."""
        num_running, num_waiting = self._scheduler.num_running, self._scheduler.num_waiting
        at_once = not num_running and not self._in_flight
        num_computed = request.ticket.stop * request.ticket.layout.block_size - 1
        headroom = num_running + num_waiting
        coming = self._scheduler.onloads.fetch(request.hashes, num_computed, headroom=headroom, at_once=at_once)
        return self._role.share(request.ticket, request.hashes, now, coming)

    def step(self, now: float) -> list[SequenceUpdate]:
        """Launches the next step and returns the updates of the step that is `depth` earlier. If there is no step to
        launch, it returns those of the oldest step in flight."""
        updates = self._tick(now)
        updates += self.advance(now)
        if self._grammars is not None and len(self._grammars):
            self._prepare_masks(self._grammars, updates)
        if self.adapters is not None and self.adapters.has_retired:
            self.free_adapters()
        return updates

    def free_adapters(self) -> None:
        """Frees unloaded adapters that no request uses."""
        if self.adapters is not None:
            self.adapters.free({request.adapter for request in self._scheduler.requests()})

    def advance(self, now: float, num_steps: int = 1) -> list[SequenceUpdate]:
        """Like `step`, without a tick of the role. `num_steps` above 1 has the effect of as many calls: the fetched
        batch takes all steps, so that their tokens come in one update. Limits: the pipeline's `row_limits`, and
        `Scheduler.prolong`."""
        assert num_steps <= self._row_limits.num_steps, f"the pipeline takes {self._row_limits.num_steps} steps at once"
        prolongs_next = not self._in_flight
        if num_steps > 1 and not prolongs_next:
            self._prolong(num_steps - 1)
        batch = self._plan(now)
        if batch is not None:
            if self._grammars is not None and self._scheduler.speculation is not None:
                self._draft_masks(self._grammars, batch)
            self._launch(batch, now)
        if num_steps > 1 and prolongs_next:
            self._prolong(num_steps - 1)
        if not self._in_flight or (batch is not None and len(self._in_flight) <= self._depth):
            return []
        oldest = self._in_flight.popleft()
        output = self._fetch(oldest)
        return self._apply(oldest.batch, output)

    def has_work(self) -> bool:
        """Whether `step` must be called again. It may still find nothing to compute: then `num_steps` stays the same
        and `num_in_flight` is 0."""
        return bool(self._in_flight) or self._scheduler.has_requests() or self._role.busy()

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not applied."""
        return len(self._in_flight)

    def listen(self, wake: Callable[[], None]) -> None:
        """Sets `wake`, which is called, from any thread, when `step` may find new work."""
        if self._grammars is not None:
            self._grammars.listener = wake

    def drain(self) -> None:
        """Accepts no new requests from now on; those accepted are served to their end."""
        self.draining = True

    def retire(self) -> None:
        """Reports requests that have not begun, for workers of another revision. Nothing is refused."""
        self.retiring = True

    def resume(self, role: Role | None = None) -> None:
        """Accepts new requests again after a drain, in another role if one is given. The engine must be idle then."""
        if role is not None:
            assert not self.has_work(), "an engine changes its role while nothing runs"
            self._role = self._scheduler.role = role
        self.draining = False

    def load(self) -> WorkerLoad:
        speculation = self._scheduler.speculation
        experts = self._expert_imbalance() if self._expert_imbalance is not None else ExpertImbalance()
        return WorkerLoad(
            step=self.num_steps,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            queued_prefill_tokens=self._scheduler.queued_prefill_tokens,
            num_free_blocks=self.pool.num_free // self.pool.windows.num_groups,
            num_blocks=self.pool.num_blocks // self.pool.windows.num_groups,
            prefill_tokens_per_s=self.speed.prefill_tokens_per_s,
            decode_step_s=self.speed.decode_step_s / (speculation.tokens_per_step() if speculation is not None else 1),
            draining=self.draining,
            retiring=self.retiring,
            host=self.pool.host.load() if self.pool.host is not None else None,
            expert_imbalance=experts.experts,
            expert_rank_imbalance=experts.ranks,
            expert_placed_imbalance=experts.placed,
            speculation=speculation.load() if speculation is not None else None,
            num_prompt_tokens=self.speed.num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            **self._role.load(),
        )

    def events_since(self, hello: Hello) -> KVEvents:
        """The events that a gateway has missed, or a snapshot if they are no longer kept."""
        return self._events.since(hello.incarnation, hello.next_seq) or self._events.snapshot(self.pool.snapshot())

    def drain_events(self) -> KVEvents | None:
        """Returns the events since the last call, or None."""
        if self._num_drained == self._events.next_seq:
            return None
        events = self._events.since(self._events.incarnation, self._num_drained)
        self._num_drained = self._events.next_seq
        return events or self._events.snapshot(self.pool.snapshot())

    def check_integrity(self, reserved_ids: Sequence[int] = ()) -> None:
        self._scheduler.check_integrity(reserved_ids)

    def written_ids(self) -> Iterator[int]:
        size = self._scheduler.pool.block_size
        for launched in self._in_flight:
            for row in launched.batch.rows:
                stop = row.stop + launched.batch.num_steps - 1
                for block_ids in row.block_tables:
                    yield from block_ids[row.start // size : -(-stop // size)]

    def assert_idle(self) -> None:
        assert not self._role.busy()
        assert self._grammars is None or not len(self._grammars)
        self._scheduler.assert_idle()

    def _check_adapter(self, adapter_id: str) -> None:
        if self.adapters is None:
            raise AdapterNotLoaded("this worker serves no adapters")
        self.adapters.require(adapter_id)

    def _tick(self, now: float) -> list[SequenceUpdate]:
        with self.timeline.span("tick"):
            return self._updates_of(self._role.tick(now, len(self._in_flight)))

    def _updates_of(self, tick: Tick) -> list[SequenceUpdate]:
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

    def _plan(self, now: float) -> Batch | None:
        with self.timeline.span("plan"):
            return self._scheduler.plan(now, self._grammars.pending() if self._grammars is not None else ())

    def _prolong(self, num_steps: int) -> None:
        (launched,) = self._in_flight
        assert isinstance(launched.pending, ProlongableStep)
        batch = self._scheduler.prolong(launched.batch, num_steps)
        self._in_flight[0] = _Launched(batch=batch, pending=launched.pending.prolong(batch), start_s=launched.start_s)

    def _launch(self, batch: Batch, now: float) -> None:
        depth = len(self._in_flight)
        with self.timeline.span("launch", batch, step=self.num_steps + depth + 1, depth=depth):
            self._role.launching(batch, now)
            start_s = self._clock()
            self._in_flight.append(_Launched(batch=batch, pending=self._pipeline.launch(batch), start_s=start_s))

    def _fetch(self, launched: _Launched) -> StepOutput:
        """Fetches a step's output. The step's time counts from the end of the previous step. Proposers compute
        between two steps, and the device waits for them: the engine's speed counts their time."""
        step = self.num_steps + launched.batch.num_steps
        with self.timeline.span("fetch", launched.batch, step=step):
            self._wait(launched)
            output = launched.pending.fetch()
        start_s, self._fetched_s = max(launched.start_s, self._fetched_s), self._clock()
        if output.ends_s:
            for before_s, end_s in pairwise((start_s, *output.ends_s)):
                self.speed.observe_decode(end_s - before_s)
        else:
            elapsed_s, speculation = self._fetched_s - start_s, self._scheduler.speculation
            drafting_s = speculation.take_seconds() if speculation is not None else 0.0
            self.speed.observe(launched.batch, elapsed_s + drafting_s)
            if speculation is not None:
                speculation.observe(launched.batch, elapsed_s)
        self._scheduler.onloads.prefill_tokens_per_s = self.speed.prefill_tokens_per_s
        if self.timeline.recording:
            pending, seen = launched.pending, (start_s, self._fetched_s)
            start_s, end_s = (pending.device_span() if isinstance(pending, DeviceTimedStep) else None) or seen
            self.timeline.add("device", start_s, end_s, launched.batch, step=step, depth=len(self._in_flight))
        self.num_steps = step
        return output

    def _apply(self, batch: Batch, output: StepOutput) -> list[SequenceUpdate]:
        with self.timeline.span("apply", batch, step=self.num_steps):
            updates = self._scheduler.apply(batch, output)
            self._num_output_tokens += sum([len(update.token_ids) for update in updates])
            return updates

    def _wait(self, launched: _Launched) -> None:
        """Advances transfers while the device computes a prompt, which takes longer than to transfer what a lane has
        staged. Not during decode steps: polling would lengthen them."""
        pending, role = launched.pending, self._role
        if not launched.batch.has_prefill or not isinstance(pending, PollableStep):
            return
        while role.is_behind() and not pending.is_over():
            role.advance_transfers(self._clock(), 1 + len(self._in_flight))
            time.sleep(POLL_S)

    def _begin(self, request: GenerateRequest) -> None:
        """Begins to compile the request's grammar; the request is admitted when its first mask is there."""
        if self._grammars is None:
            raise InvalidRequest("this worker has no grammars: send the request without one", param="grammar")
        if request.sampling.ignore_eos:
            raise InvalidRequest("ignore_eos and a grammar exclude each other: give one of them", param="ignore_eos")
        self._grammars.begin(request.request_id, request.sampling.grammar, request.output_ids)

    def _prepare_masks(self, grammars: Grammars, updates: Sequence[SequenceUpdate]) -> None:
        grammars.release([update.request_id for update in updates if update.finish_reason is not None])
        for update in updates:
            request = self._scheduler.find(update.request_id) if update.token_ids else None
            if request is not None and request.sampling.grammar and update.finish_reason is None:
                grammars.begin(request.request_id, request.sampling.grammar, tuple(request.output_ids))

    def _draft_masks(self, grammars: Grammars, batch: Batch) -> None:
        for row in batch.rows:
            if row.draft_ids and row.sample is not None and row.sample.params.grammar:
                grammars.draft(row.request_id, row.draft_ids)

    def _check_room(self) -> None:
        limit = self._scheduler.config.max_waiting
        if self._scheduler.num_waiting >= limit:
            speed = self.speed.prefill_tokens_per_s
            raise Overloaded(
                f"{self._scheduler.num_waiting} requests wait to begin on this worker, as many as max_waiting allows",
                retry_after_s=self._scheduler.queued_prefill_tokens / limit / speed if speed else None,
            )
