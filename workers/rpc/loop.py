"""Runs an engine on its own thread. Steps never wait for the network, and the event loop never waits for a step.

event loop ── call(fn) ──▶ inbox ──▶ between two steps: fn()      only this thread touches engine, role and blocks
event loop ◀── publish(StepMessage) ── after each step
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from protos.values import Health, KVEvents, SequenceUpdate, StepMessage, WorkerLoad
from workers.engine.engine import Engine
from workers.rpc.step_progress import StepProgress

log = logging.getLogger("baton.worker")

Result = TypeVar("Result")
IDLE_TICK_S = 0.02
"""How often the role is ticked while nothing can run, for leases and deadlines; arriving KV wakes the loop at once."""


class EngineLoop(Protocol):
    """Steps an engine, on a thread (`ThreadedEngineLoop`) or in simulated time. The gRPC service calls it."""

    async def call(self, fn: Callable[[], Result]) -> Result:
        """Runs `fn` between two steps. Returns its result or raises its error."""
        ...

    def post(self, fn: Callable[[], None]) -> None:
        """Runs `fn` between two steps; it must not raise."""
        ...

    def deliver(self, fn: Callable[[StepMessage], None], message: StepMessage) -> None:
        """Called between two steps: the event loop calls `fn`, in order with published messages."""
        ...

    def health(self, now: float) -> Health: ...


class ThreadedEngineLoop:
    """Steps an engine while it has work.

    - `publish` is called on the event loop, in step order, after every step with updates or events;
    - `on_fault` is called there once if the engine breaks (a lost rank, no memory): nothing runs after that;
    - `stall_s`: with work and no finished step for so long, `health` is not healthy;
    - `why_unhealthy` returns another reason for which the worker is unhealthy, or "".
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Callable[[], float],
        publish: Callable[[StepMessage], None],
        on_fault: Callable[[BaseException], None],
        stall_s: float = 60.0,
        why_unhealthy: Callable[[], str] = str,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._publish = publish
        self._on_fault = on_fault
        self._why_unhealthy = why_unhealthy
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._fault: BaseException | None = None
        self._progress = StepProgress(stall_s=stall_s, now=clock())
        self._awaiting_idle: list[asyncio.Future[None]] = []
        self._published_load = engine.load()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        engine.listen(self.wake)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step in flight."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    def wake(self) -> None:
        """Makes the loop tick soon, after an event outside the engine such as arrived KV. Callable from any thread."""
        self._wake.set()

    async def call(self, fn: Callable[[], Result]) -> Result:
        """Runs `fn` on the engine's thread between two steps. Returns its result or raises its error."""
        if self._fault is not None:
            raise self._fault
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> None:
            try:
                result = fn()
            except Exception as error:  # the caller's error: the engine is intact
                self._call_on_loop(_fail, future, error)
            else:
                self._call_on_loop(_succeed, future, result)

        self.post(run)
        return await future

    async def idle(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self.post(lambda: self._awaiting_idle.append(future))
        await future

    def post(self, fn: Callable[[], None]) -> None:
        """Runs `fn` on the engine's thread between two steps; it must not raise."""
        self._inbox.append(fn)
        self._wake.set()

    def deliver(self, fn: Callable[[StepMessage], None], message: StepMessage) -> None:
        """Called on the engine's thread: the event loop calls `fn`, in order with published messages."""
        self._call_on_loop(fn, message)

    def health(self, now: float) -> Health:
        if self._fault is not None:
            why = f"engine failed: {self._fault}"
            return Health(healthy=False, reason=why, since_last_step_s=self._progress.idle_s(now))
        health = self._progress.health(now)
        if health.healthy and (why := self._why_unhealthy()):
            return Health(healthy=False, reason=why, since_last_step_s=self._progress.idle_s(now))
        return health

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                self._turn()
        except Exception as error:  # a fault of the machine: the worker ends with it
            log.exception("the engine failed")
            self._fault = error
            self._call_on_loop(self._on_fault, error)

    def _turn(self) -> None:
        engine = self._engine
        if not engine.has_work():
            self._progress.resting()
            self._publish_idle()
            while self._awaiting_idle:
                self._call_on_loop(_succeed, self._awaiting_idle.pop(), None)
            self._wake.wait()
            return
        self._progress.working(self._clock())
        step = engine.num_steps
        updates = engine.step(self._clock())
        with engine.timeline.span("tell"):
            events = engine.drain_events()
            if updates or events:
                self._published_load = engine.load()
                self._call_on_loop(self._send, _message(updates, events, self._published_load))
        stepped = engine.num_steps != step or engine.num_in_flight > 0
        self._progress.turned(engine, stepped=stepped, now=self._clock())
        if not stepped:
            self._wake.wait(IDLE_TICK_S)

    def _publish_idle(self) -> None:
        """Publishes the load if it has changed since the last step: blocks were released, tickets have ended."""
        load = self._engine.load()
        if load != self._published_load:
            self._published_load = load
            self._call_on_loop(self._send, StepMessage(load=load))

    def _send(self, message: StepMessage) -> None:
        with self._engine.timeline.span("send", num_rows=len(message.updates)):
            self._publish(message)

    def _call_on_loop(self, fn: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            log.debug("the event loop is closed: a message is dropped")


def _message(updates: Sequence[SequenceUpdate], events: KVEvents | None, load: WorkerLoad) -> StepMessage:
    return StepMessage(updates=tuple(updates), events=(events,) if events else (), load=load)


def _succeed(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Result], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
