"""The running event loop's time, and a change that wakes every waiter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


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
