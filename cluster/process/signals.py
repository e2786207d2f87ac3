"""Ctrl-C and SIGTERM: the first one stops the process in order, the second one immediately. A hangup counts as the
first."""

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
    """Handles SIGTERM in a verb that ends by itself: like Ctrl-C, with the results so far, but with exit code 143.
    `met`: it came."""

    def __init__(self) -> None:
        self.met = False
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script's background job ignores Ctrl-C; keep that
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._heed)

    def _heed(self, number: int, frame: object) -> None:
        self.met = True
        signal.raise_signal(signal.SIGINT)

    def code(self, usual: int) -> int:
        return TERMINATED if self.met and usual == INTERRUPTED else usual


class StopSignal:
    """Made on a running event loop; takes over its signal handlers."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self.is_termination = False  # SIGTERM: an orchestrator ends this process, and may start another
        self._num_signals = 0
        loop = asyncio.get_running_loop()
        for number in INSISTING:
            loop.add_signal_handler(number, self._signalled, number)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # keeps nohup's setting
            loop.add_signal_handler(
                signal.SIGHUP, self.requested.set
            )  # Ctrl-C also ends the reader of the log, in a pipeline

    def _signalled(self, number: int) -> None:
        self.is_termination = number == signal.SIGTERM
        self._num_signals += 1  # `requested` may have been set by other code, to the same effect
        (self.forced if self._num_signals > 1 else self.requested).set()

    async def before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` until it ends (True) or a stop is requested (False). Then it is cancelled, and has cleaned up
        when this returns. Raises what `work` raises."""
        return await _race(work, self.requested)

    async def patiently(self, work: Coroutine[Any, Any, None]) -> bool:
        """Like `before`, but only a second request cuts it short."""
        return await _race(work, self.forced)


def stopping(grace_s: float) -> str:
    return f"stopping: running requests have {grace_s:g} s to finish" if grace_s else "stopping: nothing is served yet"


def stopped(in_order: bool) -> str:
    return "stopped" if in_order else "stopped immediately: running requests were cut off"


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
