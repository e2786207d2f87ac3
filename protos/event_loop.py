"""The running event loop's time, and a change that wakes every waiter."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def loop_time() -> float:
    """Seconds by the running loop's clock, which is virtual in a simulation."""
    return asyncio.get_running_loop().time()


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
