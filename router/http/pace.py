"""How long tokens wait when the event loop is late: the tokens of one answer that come within about that lateness leave
as one event. Work falls, lateness with it, and the two settle where the loop keeps up."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("baton.http")

PERIOD_S = 0.05
"""Every look wakes a process that may have nothing else to do: once in a few steps of a worker, while all is well."""
LATE_PERIOD_S = 0.005
ON_TIME_S = 0.002
"""Timers are never quite on time; a lateness below this is none."""
GAP_PER_LATENESS = 3.0
MAX_GAP_S = 0.05
_KEEP = 0.8

Flush = Callable[[float], bool]
"""Sends what is due. Returns whether anything is left."""


class Pace:
    """Measures one event loop's lateness every `period_s`, while anything is `running`. Compiled code reads `gap`."""

    def __init__(self) -> None:
        self.gap = ctypes.c_double(0.0)
        self._lateness_s = 0.0
        self._num_running = 0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due: dict[Flush, None] = {}

    @property
    def gap_s(self) -> float:
        return self.gap.value

    @gap_s.setter
    def gap_s(self, seconds: float) -> None:
        self.gap.value = seconds

    @property
    def period_s(self) -> float:
        return LATE_PERIOD_S if self.gap.value else PERIOD_S

    def when_due(self, flush: Flush) -> None:
        """Calls `flush` soon, and again while it returns that something is left. A flush that raises is dropped."""
        self._due[flush] = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """An answer is being written."""
        self._num_running += 1
        if self._timer is None:
            self._set_timer(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self.gap_s = self._lateness_s = 0.0
                self._due.clear()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + self.period_s
        self._timer = loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        late_s = now - self._due_s
        self._lateness_s = _KEEP * self._lateness_s + (1 - _KEEP) * late_s
        self.gap_s = min(GAP_PER_LATENESS * self._lateness_s, MAX_GAP_S) if self._lateness_s > ON_TIME_S else 0.0
        self.flush(now)
        self._set_timer(loop)

    def flush(self, now: float) -> None:
        """Calls the callbacks that are due."""
        for flush in tuple(self._due):
            try:
                is_left = flush(now)
            except Exception:
                log.exception("the texts of an answer that wait could not be written")
                is_left = False
            if not is_left:
                del self._due[flush]
