"""The times at which a GPU began and ended a step, in the host's time, from events in its queue. For profiles only.

    host clock    ── base_s ────────────────────────────────▶ start_s ─────────────────────▶ end_s
    device queue     base event, waited for ─────── ... ──── start event ── the step ────── end event

The first step of a profile aligns the two clocks, unless they were aligned recently, and then one step in FORGET_S.
That step is not launched ahead: the host waits until all earlier work in the queue has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FORGET_S = 30.0
"""After this long the two clocks are aligned again: their rates differ slightly."""

_cuda: Any = torch.cuda


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


class DeviceClock:
    """Times work in a device's queue. `clock` is the host's clock; `event` makes a marker for the queue, such as
    torch's CUDA events."""

    def __init__(self, clock: Callable[[], float], *, event: Callable[[], Any] = _event) -> None:
        self._clock = clock
        self._event = event
        self._base: Any = None
        self._base_s = 0.0

    def begin(self) -> TimedStep:
        if self._base is None or self._clock() - self._base_s > FORGET_S:
            self._base = self._event()
            self._base.record()
            self._base.synchronize()
            self._base_s = self._clock()
        start, end = self._event(), self._event()
        start.record()
        return TimedStep(self._base, self._base_s, start, end)


class TimedStep:
    def __init__(self, base: Any, base_s: float, start: Any, end: Any) -> None:
        self._base = base
        self._base_s = base_s
        self._start = start
        self._end = end

    def stop(self) -> None:
        """Marks the end of work queued since."""
        self._end.record()

    def span(self) -> tuple[float, float]:
        """(start, end) by the host's clock. Waits for the step's end."""
        self._end.synchronize()
        milliseconds = (self._base.elapsed_time(event) for event in (self._start, self._end))
        start_s, end_s = (self._base_s + ms / 1000 for ms in milliseconds)
        return start_s, end_s
