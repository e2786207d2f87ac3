"""Log lines about something that others can make happen at any rate: few a minute, and one line for many."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

PERIOD_S = 60.0
LINES_A_PERIOD = 2  # the beginning of an outage, and its end


class OutageLog:
    """Logs an outage and its end, at most `LINES_A_PERIOD` lines in `PERIOD_S`. Call `lost` at every failure and
    `back` at every success; a change is logged late unless it was undone meanwhile. `reason` is the last failure's,
    "" after a success."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged_lost = False
        self._num_losses = 0  # since the last line
        self._lines_s: deque[float] = deque(maxlen=LINES_A_PERIOD)
        self.reason = ""

    def lost(self, reason: str, message: str) -> None:
        if not self.reason:
            self._num_losses += 1
        self.reason = reason
        if not self._logged_lost:
            self._tell(logging.WARNING, message)

    def back(self, message: str) -> None:
        self.reason = ""
        if self._logged_lost:
            self._tell(logging.INFO, message)

    def _tell(self, level: int, message: str) -> None:
        now = self._clock()
        if len(self._lines_s) == LINES_A_PERIOD and now < self._lines_s[0] + PERIOD_S:
            return
        more = f" (lost {self._num_losses} times in the last {now - self._lines_s[-1]:.0f} s)" if self._lines_s else ""
        self._log.log(level, "%s%s", message, more if self._num_losses > 1 else "")
        self._lines_s.append(now)
        self._num_losses = 0
        self._logged_lost = level == logging.WARNING


class RareLog:
    """Logs the first of many like events at once, and the others together, once in `PERIOD_S`."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged_s = -PERIOD_S
        self._met_s = -PERIOD_S
        self._message = ""
        self._num_unlogged = 0

    def note(self, message: str) -> None:
        now = self._clock()
        self._met_s, self._message = now, message
        if now < self._logged_s + PERIOD_S:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more in the last {now - self._logged_s:.0f} s)" if self._num_unlogged else ""
        self._log.warning("%s%s", message, more)
        self._logged_s, self._num_unlogged = now, 0

    def over(self) -> None:
        self._met_s = -PERIOD_S

    @property
    def recent(self) -> str:
        """The last message, "" when it is older than `PERIOD_S`, or `over`."""
        return self._message if self._clock() < self._met_s + PERIOD_S else ""
