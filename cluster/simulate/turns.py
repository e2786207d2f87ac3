"""An engine's turns in simulated time: what `workers.rpc.loop.EngineLoop` does on a thread, done by timers.

    wake ─▶ inbox ─▶ Engine.step ─▶ (the device's time passes) ─▶ publish, inbox ─▶ Engine.step ─▶ ...

A leap: while sequences only decode and nobody else wants anything, the steps are left to be taken until the first of
them could end an answer, or somebody looks: then all of them are taken, each at its own time, and told in one message.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from cluster.simulate.device import Device
from protos.values import FinishReason, Health, SequenceUpdate, StepMessage
from workers.engine.engine import Engine
from workers.rpc.loop import IDLE_TICK_S

Result = TypeVar("Result")

MOMENT_S = 1e-9
LEAST_LEAP = 3
"""Steps below which a leap is not worth it."""
MAX_GROWTH = 1.5
"""By so much at most a step of a leap is longer than the one before it."""


class EngineTurns:
    """`workers.rpc.loop.Turns`. `publish` is called with each step's message when the step is over.

    Frozen, it takes no turn and no call. The engine's clock is `skew_s` ahead. `quiet_until` says until when, by the
    engine's clock, its role certainly does nothing unless something comes from outside; without it there are no leaps.
    `before_handover` is called a moment before a prompt's first token is told: its gateway then looks at others.
    """

    def __init__(
        self,
        engine: Engine,
        device: Device,
        *,
        publish: Callable[[StepMessage], None],
        stall_s: float = 60.0,
        skew_s: float = 0.0,
        quiet_until: Callable[[], float] | None = None,
        before_handover: Callable[[], object] | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._publish = publish
        self._stall_s = stall_s
        self._skew_s = skew_s
        self._quiet_until = quiet_until
        self._before_handover = before_handover
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._updates: list[SequenceUpdate] = []  # of steps that nobody was told of
        self._busy = False
        self._leap_from_s: float | None = None
        self._working = False
        self._last_progress_s = self._loop.time()
        self._told = engine.load()
        self._stopped = False
        self._frozen = False

    # -- as a service sees it ------------------------------------------------------------------------------------------

    async def call(self, fn: Callable[[], Result]) -> Result:
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:  # belongs to the caller: the engine itself is intact
                failure = error
                self._loop.call_soon(lambda: None if future.done() else future.set_exception(failure))
            else:
                self._loop.call_soon(lambda: None if future.done() else future.set_result(result))

        self.post(run)
        return await future

    def post(self, fn: Callable[[], None]) -> None:
        self._inbox.append(fn)
        self.wake()

    def tell(self, fn: Callable[[StepMessage], None], message: StepMessage) -> None:
        self._loop.call_soon(fn, message)

    def wake(self) -> None:
        """Something outside the engine happened. Between two steps the next turn begins at once."""
        if self._stopped or self._frozen:
            return
        self.settle()
        if not self._busy:
            self._arm(self._loop.time())

    def health(self, now: float) -> Health:
        idle_s = 0.0 if self._leap_from_s is not None else now - self._skew_s - self._last_progress_s
        if self._working and idle_s > self._stall_s:
            return Health(healthy=False, reason=f"no step finished for {idle_s:.0f} s", since_last_step_s=idle_s)
        return Health(healthy=True, since_last_step_s=idle_s if self._working else 0.0)

    # -- its process ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The process has ended: nothing is published any more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def freeze(self) -> None:
        self.settle()
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

    def _due(self) -> None:
        self._timer = None
        if self._frozen:
            return
        if self._leap_from_s is not None:
            self.settle()
        elif self._busy:
            self._finish()
        else:
            self._turn()

    def _finish(self) -> None:
        """The step in flight is over."""
        self._busy = False
        self._last_progress_s = self._loop.time()
        self._tell()
        self._turn()

    def _turn(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        if not self._engine.has_work():
            self._working = False
            self._say_idle()
            return
        if not self._working:
            self._last_progress_s = self._loop.time()
        self._working = True
        if self._may_leap():
            self._begin_leap()
            return
        end_s = self._step(self._loop.time())
        if end_s is None:
            self._tell()
            quiet_s = self._quiet_s()
            num_ticks = max(1, math.ceil(quiet_s / IDLE_TICK_S)) if math.isfinite(quiet_s) else 1
            self._arm(self._loop.time() + num_ticks * IDLE_TICK_S)
        else:
            self._busy = True
            self._arm(end_s)
            if self._before_handover is not None and any(map(_hands_over, self._updates)):
                self._loop.call_at(end_s - MOMENT_S, self._before_handover)

    def _step(self, start_s: float) -> float | None:
        """One step of the engine from `start_s` on; when it is over, or None if there was nothing to compute. Its
        state is the one after the step; until that is over nobody looks."""
        engine, device = self._engine, self._device
        device.now_s = start_s
        num_steps = engine.num_steps
        self._updates += engine.step(start_s + self._skew_s)
        return device.now_s if engine.num_steps != num_steps or engine.num_in_flight else None

    def _tell(self) -> None:
        """What the steps since the last message have to say, as one message."""
        updates, self._updates = self._updates, []
        events = self._engine.drain_events()
        if updates or events:
            self._told = self._engine.load()
            self._publish(StepMessage(updates=merged(updates), events=(events,) if events else (), load=self._told))

    def _say_idle(self) -> None:
        load = self._engine.load()
        if load != self._told:
            self._told = load
            self._publish(StepMessage(load=load))

    # -- leaps ---------------------------------------------------------------------------------------------------------

    def _may_leap(self) -> bool:
        """Is the last step one of a row of equal steps, in which nobody's answer ends?"""
        engine = self._engine
        if engine.scheduler.num_waiting or self._quiet_s() <= 0.0:
            return False
        rows = self._device.last.rows
        if not rows or len(rows) != engine.scheduler.num_running:
            return False
        num_ahead = self._num_ahead()
        return num_ahead >= LEAST_LEAP and self._has_room(num_ahead * len(rows) + len(rows) * engine.pool.block_size)

    def _quiet_s(self) -> float:
        """For how long from now the role does nothing by itself."""
        return self._quiet_until() - self._loop.time() - self._skew_s if self._quiet_until is not None else 0.0

    def _has_room(self, num_tokens: int) -> bool:
        """Then nobody has to give up blocks meanwhile."""
        return self._engine.pool.num_free * self._engine.pool.block_size >= num_tokens

    def _num_ahead(self) -> int:
        """Steps that certainly pass before one could end an answer. 0 where that cannot be said."""
        least = 1 << 30
        for row in self._device.last.rows:
            sample = row.sample
            if sample is None or row.num_tokens != 1 or sample.params.stop_token_ids:
                return 0
            least = min(
                least, sample.params.max_tokens - sample.index - 1, self._engine.scheduler.max_len - row.stop - 1
            )
        return least - 1 - self._engine.num_in_flight

    def _begin_leap(self) -> None:
        now = self._loop.time()
        self._leap_from_s = now
        self._arm(now + min(self._num_ahead() * self._device.last_s * (1 - 1e-9), self._quiet_s()))

    def settle(self) -> None:
        """Takes the steps of a leap that are over by now; the one under way ends as any other does."""
        start_s, self._leap_from_s = self._leap_from_s, None
        if start_s is None:
            return
        now = self._loop.time()
        while True:
            if self._updates and start_s + MAX_GROWTH * self._device.last_s > now:
                self._tell()  # of the steps so far: the next one may not be over by now
            end_s = self._step(start_s)
            if end_s is None or end_s > now:
                break
            start_s = self._last_progress_s = end_s
        assert end_s is not None, "sequences that decode always have a next step"
        assert end_s <= start_s + MAX_GROWTH * self._device.last_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._busy = True
        self._arm(end_s)


def _hands_over(update: SequenceUpdate) -> bool:
    return update.finish_reason is FinishReason.PREFILLED


def merged(updates: Sequence[SequenceUpdate]) -> tuple[SequenceUpdate, ...]:
    """One update a request, that says what its updates say one after the other."""
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
        token_ids=tuple([token_id for update in updates for token_id in update.token_ids]),
        num_cached_tokens=first.num_cached_tokens,
    )
