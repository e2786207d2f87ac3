"""An engine's loop in simulated time: timers do what `workers.rpc.loop.ThreadedEngineLoop` does on a thread.

wake ─▶ inbox ─▶ Engine.step ─▶ (the device's time passes) ─▶ publish, inbox ─▶ Engine.step ─▶ ..."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from msgspec.structs import replace

from cluster.simulate.node.device import Device
from cluster.simulate.node.itl import Gaps
from cluster.simulate.node.leaps import num_steady, num_uniform
from cluster.simulate.world.clock import Timer, running_loop
from protos.values import Health, KVEvents, SequenceUpdate, StepMessage, WorkerLoad
from workers.engine.engine import Engine
from workers.rpc.loop import IDLE_TICK_S
from workers.rpc.step_progress import StepProgress

Result = TypeVar("Result")

MIN_CALM_STEPS = 3
"""Steps that are published one by one after a change, until gateways have seen its effects
(`router.fleet.member.STEPS_TO_SHOW`)."""


_BUT_STEP = attrgetter(*(field.name for field in fields(WorkerLoad) if field.name != "step"))


class SimulatedEngineLoop:
    """An `EngineLoop`. `num_turns` grows with each change of state.

    - `move` lands and sends KV; True if a request may begin or end by it; `advance_transfers` does so during a step
    - `skew_s`: how far the engine's clock is ahead
    - `quiet_until`: its role does nothing before, by the engine's clock; None: no leaps
    - `gaps` records all published tokens, with the ends of their steps
    - `withholds`: tokens between an answer's first and last are published with its end, since no decision depends on
      them
    """

    def __init__(
        self,
        engine: Engine,
        device: Device,
        *,
        publish: Callable[[StepMessage], None],
        move: Callable[[float], bool],
        advance_transfers: Callable[[float], None],
        stall_s: float = 60.0,
        skew_s: float = 0.0,
        quiet_until: Callable[[], float] | None = None,
        gaps: Gaps | None = None,
        withholds: bool = False,
        round_trip_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._device = device
        self._publish = publish
        self._move = move
        self._advance_transfers = advance_transfers
        self._turning = False
        self.skew_s = skew_s
        self._quiet_until = quiet_until
        self._loop = running_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._timer: Timer | None = None
        self._updates: list[SequenceUpdate] = []  # not published yet
        self._withholds = withholds and quiet_until is not None
        self._round_trip_s = round_trip_s
        self._withheld: dict[str, list[SequenceUpdate]] = {}  # by request whose first tokens were published
        self._made: list[tuple[list[str], Sequence[float]]] = []  # requests with a token per step, ends of steps
        self._gaps = gaps
        self._busy = False
        self._has_prefill = False  # whether the step in progress computes a prompt
        self._ahead_s: Sequence[float] = ()  # the ends of a leap's steps
        self._num_calm = 0
        self._num_rows = 0
        self._progress = StepProgress(stall_s=stall_s, now=self._loop.time())
        self._published_load = engine.load()
        self._stopped = False
        self._frozen = False
        self.num_turns = 0
        self.ticked_s = -math.inf  # the last tick of the engine's role, by the engine's clock

    # -- the service's interface ---------------------------------------------------------------------------------------

    async def call(self, fn: Callable[[], Result]) -> Result:
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:  # the caller's error: the engine itself is intact
                failure = error
                self._loop.call_soon(lambda: None if future.done() else future.set_exception(failure))
            else:
                self._loop.call_soon(lambda: None if future.done() else future.set_result(result))

        self.post(run)
        return await future

    def post(self, fn: Callable[[], None]) -> None:
        self._inbox.append(fn)
        self.wake()

    def deliver(self, fn: Callable[[StepMessage], None], message: StepMessage) -> None:
        self._loop.call_soon(fn, message)

    def wake(self) -> None:
        if self._stopped or self._frozen:
            return
        self._resume()
        self._num_calm = 0

    def on_kv(self) -> None:
        """KV has arrived or left. During a decode step it waits for the next turn. A turn begins, or a leap ends, only
        if a request may begin or end."""
        if self._stopped or self._frozen or (self._busy and not self._has_prefill):
            return
        if self._turning:
            self._loop.call_soon(self.on_kv)
            return
        self.num_turns += 1
        now = self._loop.time()
        if self._busy:
            self._advance_transfers(now + self.skew_s)
        elif self._move(now + self.skew_s):
            self._resume()
        elif not self._ahead_s and self._timer is None:
            self._rest()

    def _resume(self) -> None:
        if self._cut_leap():
            return
        self.flush()
        if not self._busy:
            self._arm(self._loop.time())

    def health(self, now: float) -> Health:
        over = bisect_right(self._ahead_s, now - self.skew_s)
        if over:
            self._progress.turned(self._engine, stepped=True, now=self._ahead_s[over - 1])
        return self._progress.health(now - self.skew_s)

    @property
    def is_due(self) -> bool:
        return bool(self._inbox)

    # -- the process ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._stopped = True
        self._disarm()

    def freeze(self) -> None:
        self.flush()
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        if not self._busy:
            self._arm(self._loop.time())
        elif self._timer is None:
            self._finish()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if self._frozen:
            return
        if self._ahead_s:
            self.flush()
            self._finish()
        elif self._busy:
            self._finish()
        else:
            self._turn()

    def _finish(self) -> None:
        self._busy = False
        self._progress.turned(self._engine, stepped=True, now=self._loop.time())
        self._publish_step()
        self._turn()

    def _turn(self) -> None:
        self.num_turns += 1
        self._turning = True
        try:
            self._take_turn()
        finally:
            self._turning = False

    def _take_turn(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        if not self._engine.has_work():
            self._progress.resting()
            self._publish_idle()
            return
        self._progress.working(self._loop.time())
        if self._leap():
            return
        end_s = self._step(self._loop.time())
        if end_s is not None:
            self._busy = True
            self._arm(end_s)
            return
        self._progress.turned(self._engine, stepped=False, now=self._loop.time())
        self._publish_step()
        self._rest()

    def _rest(self) -> None:
        """The next turn is when the role may have something to do, in whole ticks from now."""
        quiet_s = self._quiet_until() - self._loop.time() - self.skew_s if self._quiet_until is not None else 0.0
        num_ticks = max(1, math.ceil(quiet_s / IDLE_TICK_S)) if math.isfinite(quiet_s) else 1
        if self._timer is None:
            self._timer = self._loop.call_first(self._loop.time() + num_ticks * IDLE_TICK_S, self._due)

    def _step(self, start_s: float) -> float | None:
        """Returns the step's end, or None if there was nothing to compute. The engine is then in the state after the
        step, although the step has not ended."""
        engine, device = self._engine, self._device
        device.now_s = start_s
        num_steps, before = engine.num_steps, device.last if engine.num_in_flight else None
        self.ticked_s = start_s + self.skew_s
        updates = engine.step(self.ticked_s)
        self._has_prefill = (before or device.last).has_prefill
        self._record(updates, (device.now_s,))
        return device.now_s if engine.num_steps != num_steps or engine.num_in_flight else None

    def _publish_step(self, *, shows: bool | None = None) -> None:
        """Publishes everything since the last message. `shows`: gateways wait for this step."""
        updates, self._updates = self._updates, []
        self._count_gaps()
        self._num_calm += 1
        if not self._withholds:
            num_rows, self._num_rows = self._num_rows, len(self._device.last.rows)
            ended = any(update.finish_reason is not None or update.error is not None for update in updates)
            self._num_calm = 0 if ended or num_rows != self._num_rows else self._num_calm
        events = self._engine.drain_events()
        if not updates and not events:
            return
        if self._is_withholding:
            updates = self._sifted(updates)
            if not updates and shows is None and self._num_calm > MIN_CALM_STEPS:
                return self._publish_load(events)
        if shows is not False:
            self._published_load = self._engine.load()
        elif not updates and not events:
            return
        load = self._published_load if shows is not False else None
        self._publish(StepMessage(updates=merged(updates), events=(events,) if events else (), load=load))

    @property
    def _is_withholding(self) -> bool:
        """A worker that drains withholds nothing: answers migrate with the published tokens."""
        return self._withholds and not self._engine.draining

    def _sifted(self, updates: Sequence[SequenceUpdate]) -> list[SequenceUpdate]:
        """Leaves out further tokens of answers whose first tokens were published, until their next update of another
        kind."""
        published: list[SequenceUpdate] = []
        withheld = self._withheld
        for update in updates:
            waiting = withheld.get(update.request_id)
            if waiting is not None and update.is_plain:
                waiting.append(update)
                continue
            published += waiting or ()
            published.append(update)
            if update.finish_reason is None:
                withheld[update.request_id] = []
            else:
                withheld.pop(update.request_id, None)
        scheduler = self._engine.scheduler
        if len(withheld) > 2 * scheduler.num_running + 64:  # some were aborted
            for request_id in [request_id for request_id in withheld if request_id not in scheduler]:
                del withheld[request_id]
        return published

    def _publish_load(self, events: KVEvents | None) -> None:
        """Publishes events, and the load if more than its step changed."""
        load = self._engine.load()
        if events or _BUT_STEP(load) != _BUT_STEP(self._published_load):
            self._published_load = load
            self._publish(StepMessage(events=(events,) if events else (), load=load))

    def _record(self, updates: Sequence[SequenceUpdate], ends_s: Sequence[float]) -> None:
        self._updates += updates
        request_ids = [update.request_id for update in updates if update.token_ids]
        if request_ids and self._gaps is not None:
            self._made.append((request_ids, ends_s))

    def _count_gaps(self) -> None:
        made, self._made = self._made, []
        if self._gaps is not None:
            for request_ids, ends_s in made:
                self._gaps.made(request_ids, ends_s)

    def _publish_idle(self) -> None:
        load = self._engine.load()
        if load != self._published_load:
            self._published_load = load
            self._publish(StepMessage(load=load))

    # -- leaps ---------------------------------------------------------------------------------------------------------

    def _foresee(self) -> list[float]:
        """Returns the ends of the next steps that are alike, up to the first after which a load is published. Soon
        after a change it is at most one step: gateways count the next messages (`MIN_CALM_STEPS`)."""
        engine, device = self._engine, self._device
        num_in_flight = engine.num_in_flight
        num_steps = num_uniform(engine.scheduler, device.last, num_in_flight) if num_in_flight == engine.depth else 0
        if not num_steps:
            return []
        if self._num_calm < MIN_CALM_STEPS:
            num_steps = 1
        now = self._loop.time()
        quiet_until_s = self._quiet_until() - self.skew_s if self._quiet_until is not None else now
        device.now_s = now
        ends_s = device.foresee(num_steps, in_flight=bool(num_in_flight))
        starts_s = [now, *ends_s[:-1]]
        num_steps = bisect_left(starts_s, quiet_until_s)
        steps_s = [end_s - start_s for start_s, end_s in zip(starts_s, ends_s[:num_steps], strict=False)]
        return ends_s[: num_steady(engine.speed, steps_s)]

    def _leap(self) -> bool:
        if self._quiet_until is None:
            return False
        self._ahead_s = self._foresee()
        if self._ahead_s:
            self._arm(self._ahead_s[-1])
        return bool(self._ahead_s)

    def _cut_leap(self) -> bool:
        """Lets a leap end with the step in progress, unless a gateway must get the earlier steps now. True if nothing
        else must be done."""
        ahead_s = self._ahead_s
        if not ahead_s or self._busy:
            return bool(ahead_s)
        num_over = bisect_right(ahead_s, self._loop.time())
        if not self._is_withholding or num_over == len(ahead_s) or self._is_awaited(num_over):
            return False
        self._ahead_s = ahead_s[: num_over + 1]
        self._continue_until(ahead_s[num_over])
        return True

    def _continue_until(self, end_s: float) -> None:
        self._busy, self._has_prefill = True, False
        self._disarm()
        self._arm(end_s)

    def _is_awaited(self, num_over: int) -> bool:
        """Whether a gateway gets the last message of `num_over` steps after it sent the event that ends the leap."""
        return num_over > 0 and self._ahead_s[num_over - 1] > self._loop.time() - self._round_trip_s

    def flush(self) -> None:
        """Takes the steps of a leap that have ended by now, and begins the step in progress."""
        ahead_s = self._ahead_s
        if not ahead_s:
            return
        self.num_turns += 1
        if self._busy:  # the batch was cut to these rows
            self._ahead_s = []
            self._take_steps(ahead_s)
            if len(ahead_s) > 1:
                self._progress.turned(self._engine, stepped=True, now=ahead_s[-2])
            return
        num_over = bisect_right(ahead_s, self._loop.time())
        shows = self._is_awaited(num_over)
        self._ahead_s = []
        if num_over:
            self._take_steps(ahead_s[:num_over])
            self._progress.turned(self._engine, stepped=True, now=ahead_s[num_over - 1])
        if num_over < len(ahead_s):
            self._publish_step(shows=shows)
            self._take_steps(ahead_s[num_over : num_over + 1])
            self._continue_until(ahead_s[num_over])

    def _take_steps(self, ends_s: Sequence[float]) -> None:
        self._record(self._engine.advance(self._device.now_s + self.skew_s, len(ends_s)), ends_s)


def merged(updates: Sequence[SequenceUpdate]) -> tuple[SequenceUpdate, ...]:
    """Returns one update per request, with the tokens of all its updates."""
    by_request: dict[str, list[SequenceUpdate]] = {}
    for update in updates:
        by_request.setdefault(update.request_id, []).append(update)
    if len(by_request) == len(updates):
        return tuple(updates)
    return tuple([rows[0] if len(rows) == 1 else _joined(rows) for rows in by_request.values()])


def _joined(updates: Sequence[SequenceUpdate]) -> SequenceUpdate:
    first, last = updates[0], updates[-1]
    return replace(
        last,
        token_ids=tuple(chain.from_iterable([update.token_ids for update in updates])),
        num_cached_tokens=first.num_cached_tokens,
    )
