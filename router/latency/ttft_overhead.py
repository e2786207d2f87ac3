"""What every first token takes besides its prefill: no worker can meet a limit below it."""

from __future__ import annotations

import math


class TtftOverhead:
    """The least that lately came to a first token on an idle worker beside the reading of its prompt: steps, calls, the
    gateway itself. It is not known (0) before `ENOUGH` observations; it rises when so many of two periods say so.

    For every two periods without any it becomes less by half: what was far from possible is not let through at once
    because nobody has asked, and what was refused, which is never observed, is tried again. Another reader may be
    faster: once one has come or left nothing is known.
    """

    PERIOD_S = 60.0
    ENOUGH = 8
    KEPT = 0.5

    def __init__(self) -> None:
        self._readers: dict[str, None] = {}
        self._reset()

    def _reset(self) -> None:
        self._least_s = self._before_s = math.inf  # in this period, and in the one before it
        self._num_least = self._num_before = self._num_observed = 0
        self._known_s = 0.0
        self._since_s = self._last_s = 0.0

    def add(self, worker_id: str) -> None:
        """One of those that read, perhaps a new one."""
        if worker_id not in self._readers:
            self._readers[worker_id] = None
            self._reset()

    def drop(self, worker_id: str) -> None:
        if worker_id in self._readers:
            del self._readers[worker_id]
            self._reset()

    def observe(self, seconds: float, *, reading_s: float, now: float) -> None:
        """A first token came after `seconds`, of which prefill should take `reading_s`. Where that is the larger part,
        the rest is noise of the speed and does not count."""
        beside_s = seconds - reading_s
        if reading_s > beside_s:
            return
        self._turn(now)
        self._least_s = min(self._least_s, beside_s)
        self._num_least += 1
        if self._num_least + self._num_before >= self.ENOUGH:
            self._known_s = min(self._least_s, self._before_s)
        else:
            self._known_s = min(self._left_s(now), beside_s) if self._num_observed else beside_s
        self._num_observed += 1
        self._last_s = now

    def at(self, now: float) -> float:
        return self._left_s(now) if self._num_observed >= self.ENOUGH else 0.0

    def _left_s(self, now: float) -> float:
        return float(self._known_s * self.KEPT ** ((now - self._last_s) // (2 * self.PERIOD_S)))

    def _turn(self, now: float) -> None:
        if now < self._since_s + self.PERIOD_S:
            return
        follows = now < self._since_s + 2 * self.PERIOD_S
        self._before_s, self._num_before = (self._least_s, self._num_least) if follows else (math.inf, 0)
        self._least_s, self._num_least, self._since_s = math.inf, 0, now
