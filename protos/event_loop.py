"""The running event loop's time, its own pauses, and a change that wakes every waiter."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from math import inf
from typing import Any

log = logging.getLogger("baton")


class _Latest(threading.local):
    """The loop that ran last in a thread. Python 3.11 calls the system whenever the running loop is looked up."""

    loop: asyncio.AbstractEventLoop | None = None


_latest = _Latest()


def loop_time() -> float:
    """Seconds by the running loop's clock, which is virtual in a simulation."""
    loop = _latest.loop
    if loop is None or not loop.is_running():
        loop = _latest.loop = asyncio.get_running_loop()
    return loop.time()


class Changed:
    """Ends every wait that began before a change. `count` is the number of changes so far."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    def wait(self) -> Coroutine[Any, Any, object]:
        """Returns at the next change after this call, even if the wait has not begun to run."""
        return self._event.wait()


class OwnPauses:
    """Notices that the process was stopped or frozen. For `RECENT_S` after that, silent peers are not faulty:
    connections and deadlines ended because of this process."""

    PERIOD_S = 0.5
    PAUSE_S = 1.0  # less than gRPC's keepalive waits
    RECENT_S = 5.0

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = inf
        self._ended_s = -inf

    def watch(self) -> None:
        if self._timer is None:
            self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looked_s = None, inf

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.PERIOD_S, self._look)
        self.is_recent()

    def is_recent(self) -> bool:
        """Whether the loop stood still lately; False if nothing watches it."""
        if self._timer is None:
            return False
        now = loop_time()
        paused_s = now - self._looked_s - self.PERIOD_S
        self._looked_s = now
        if paused_s > self.PAUSE_S:
            log.warning("this process stood still for %.1f s: lost connections are opened again", paused_s)
            self._ended_s = now
        return now - self._ended_s < self.RECENT_S
