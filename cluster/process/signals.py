"""Ctrl-C and SIGTERM: the first asks the process to stop in order, the second to stop now. A hangup only asks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

INSISTING = (signal.SIGINT, signal.SIGTERM)
SIGNALS = (*INSISTING, signal.SIGHUP)
INTERRUPTED, TERMINATED = 130, 143  # exit codes, as shells have them
RAY_THREAD = "ray"


class Termination:
    """SIGTERM to a verb that ends by itself: as Ctrl-C, with what it has so far, but exit code 143. `met`: it came."""

    def __init__(self) -> None:
        self.met = False
        if (
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        ):  # of a script's background job: Ctrl-C could not be passed on
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._heed)

    def _heed(self, number: int, frame: object) -> None:
        self.met = True
        signal.raise_signal(signal.SIGINT)

    def code(self, usual: int) -> int:
        """What the process exits with that would have exited with `usual`."""
        return TERMINATED if self.met and usual == INTERRUPTED else usual


class StopSignal:
    """Made on a running event loop, whose signals it takes over."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self._num_signals = 0
        loop = asyncio.get_running_loop()
        for number in INSISTING:
            loop.add_signal_handler(number, self._signalled)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's wish is respected
            loop.add_signal_handler(signal.SIGHUP, self.asked.set)  # with Ctrl-C whoever reads the log ends, too

    def _signalled(self) -> None:
        self._num_signals += 1  # `asked` may have been set by somebody else, who means the same
        (self.forced if self._num_signals > 1 else self.asked).set()

    async def before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` until it ends (True) or a stop is asked for (False): then it is cancelled, and has cleaned up
        when this returns. Raises what `work` raises."""
        return await _race(work, self.asked)

    async def patiently(self, work: Coroutine[Any, Any, None]) -> bool:
        """As `before`, but only a second request cuts it short."""
        return await _race(work, self.forced)


def stopping(grace_s: float) -> str:
    """What people are told."""
    return f"stopping: running requests have {grace_s:g} s to finish" if grace_s else "stopping: nothing is served yet"


def stopped(in_order: bool) -> str:
    """What people are told last, when no process is left."""
    return "stopped" if in_order else "stopped at once: what ran was cut off"


async def _race(work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
    task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
    finally:
        signalled.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        return False
    task.result()
    return True
