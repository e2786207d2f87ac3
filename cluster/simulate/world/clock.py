"""An event loop with a virtual clock that runs all callbacks in one deterministic order.

    callbacks are ready ─▶ run in the order they were scheduled (as asyncio guarantees)
    none is ready       ─▶ jump to the next timers' time; timers of one instant run in an order drawn from the seed,
                           after ticks of idle parts, which some runs leave out

The loop raises if code uses the outside world, or waits while nothing is scheduled.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

MAX_SPAN_S = 31 * 86_400.0
"""Idle seconds are not skipped: an idle worker's heartbeats, leases and timers cost 0.1 to 0.2 ms of CPU a second."""
MAX_CALLBACKS_AN_INSTANT = 5_000_000
_FIRST = 2**62
_WORD = 2**64 - 1


class Deadlock(AssertionError): ...


class Standstill(AssertionError): ...


class OutsideWorld(AssertionError): ...


class Handle:
    """Replaces `asyncio.Handle`, whose debugging support was half of a callback's cost."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context if context is not None else copy_context()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled, self.callback, self.args = True, None, ()

    def cancelled(self) -> bool:
        return self.is_cancelled


class Timer(Handle):
    __slots__ = ("_loop", "_when", "is_due")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        super().__init__(callback, args, context)
        self._loop = loop
        self._when = when
        self.is_due = False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        if not self.is_cancelled:
            super().cancel()
            if not self.is_due:  # every `asyncio.sleep` cancels its own timer after it has left the heap
                self._loop.one_was_cancelled()


class VirtualLoop(asyncio.BaseEventLoop):
    """`seed` decides the order of timers of one instant; `after` is called at the end of each instant.

    An unhandled exception ends the run and is raised. Events after `over_s` are clean-up.
    """

    _ready: deque[Handle]  # asyncio's own names
    _stopping: bool
    _closed: bool

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.after: Callable[[], None] | None = None
        self.num_callbacks = 0
        self.over_s: float | None = None
        self._now_s = 0.0
        self._order = random.Random(f"{seed} order of timers").getrandbits(64)
        self._timers: list[tuple[float, int, Timer]] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._num_this_instant = 0
        self._thread = threading.get_ident()
        self._fault: BaseException | None = None
        self.set_exception_handler(self._fail)

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        if self._closed:
            self._check_closed()
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        if self._closed:
            self._check_closed()
        timer = Timer(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def call_first(self, when: float, callback: Callable[[], object]) -> Timer:
        """Schedules a timer before all others of the same instant, without changing their order."""
        timer = Timer(when, callback, (), self, None)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers - _FIRST, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        if threading.get_ident() != self._thread:
            raise OutsideWorld("a thread called into the simulation: its time is not ours")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        raise OutsideWorld(f"{func} was to run on a thread, whose time is not ours")

    # -- asyncio's interface of a loop
    # ----------------------------------------------------------------------------------

    def _check_closed(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")

    def one_was_cancelled(self) -> None:
        """Counts a cancelled timer. Most timers are unused timeouts: they are removed once they are half of the
        heap."""
        self._num_cancelled += 1
        if self._num_cancelled > 64 and self._num_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].is_cancelled]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _write_to_self(self) -> None: ...

    def _process_events(self, event_list: Any) -> None:
        raise OutsideWorld("there are no file descriptors to be polled")

    def _run_once(self) -> None:
        """Runs everything that is ready; callbacks scheduled meanwhile run with the next call."""
        ready = self._ready
        if not ready:
            self._jump()
        num = len(ready)
        for _ in range(num):
            handle = ready.popleft()
            if handle.callback is not None:
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"{handle.callback} failed", "exception": error})
        self.num_callbacks += num
        self._num_this_instant += num
        if self._num_this_instant > MAX_CALLBACKS_AN_INSTANT:
            raise Standstill(f"{self._num_this_instant} callbacks at {self._now_s:.6f} s, and more to come")
        if self._fault is not None:  # stops first: the state may be inconsistent
            fault, self._fault = self._fault, None
            raise fault
        if self.after is not None and not ready:
            self.after()

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
            self._num_cancelled -= 1
        if not timers:
            if self._stopping:
                return
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Deadlock(f"nothing is scheduled any more, and these wait: {', '.join(waiting)}")
        when = timers[0][0]
        if when > self._now_s:
            self._now_s = when
            self._num_this_instant = 0
        due: list[Timer] = []
        while timers and timers[0][0] <= self._now_s:
            _, number, timer = heapq.heappop(timers)
            if timer.is_cancelled:
                self._num_cancelled -= 1
            else:
                timer.is_due = True
                (due if number > 0 else self._ready).append(timer)
        self._ready.extend(due if len(due) < 2 else self._shuffled(due))

    def _shuffled(self, due: list[Timer]) -> list[Timer]:
        """A leap over some events does not change the order of others. Mixed as in Steele, Lea and Flood, "Fast
        splittable pseudorandom number generators" (2014)."""
        state, places = self._order ^ hash(self._now_s), []
        for place in range(len(due)):
            state = (state + 0x9E3779B97F4A7C15) & _WORD
            mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
            places.append((mixed ^ (mixed >> 31), place))
        return [due[place] for _, place in sorted(places)]

    def interrupt(self) -> None:
        """Ends the run after the callbacks that are ready: none stops half-way."""
        self._fault = KeyboardInterrupt()

    def check_interrupted(self) -> None:
        if isinstance(self._fault, KeyboardInterrupt):
            fault, self._fault = self._fault, None
            raise fault

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._fault = error if error is not None else AssertionError(context.get("message", "a callback failed"))


def running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def run_virtually(main: Coroutine[Any, Any, Result], *, loop: VirtualLoop) -> Result:
    """Raises the coroutine's exception, or that of another task."""
    asyncio.set_event_loop(loop)
    with _ended_by_ctrl_c(loop):  # also during closing: Python drops exceptions raised in a destructor
        try:
            # No list of running generators is needed.
            loop.call_soon(partial(sys.set_asyncgen_hooks, firstiter=None))
            return loop.run_until_complete(main)
        finally:
            loop.over_s = loop.time()
            _end(loop)
            asyncio.set_event_loop(None)
            loop.close()


@contextmanager
def _ended_by_ctrl_c(loop: VirtualLoop) -> Iterator[None]:
    """Ctrl-C ends the loop between two callbacks; a second one raises at once. An ignored Ctrl-C stays ignored."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        loop.interrupt()

    signal.signal(signal.SIGINT, end)
    try:
        yield
        loop.check_interrupted()  # the loop may have ended before it could check
    finally:
        signal.signal(signal.SIGINT, usual)


def _end(loop: VirtualLoop) -> None:
    """Cancels the remaining tasks. Their errors are ignored: the run is over."""
    loop.after = None
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in tasks:
        task.cancel()
    loop.set_exception_handler(lambda loop, context: None)
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
