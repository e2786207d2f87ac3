"""The time of every first token besides its prefill: no worker can meet a limit below it."""

from __future__ import annotations

import math


class TtftOverhead:
    """The least that a first token on an idle worker took lately besides its prefill: steps, calls, the gateway itself.
    Unknown (0) before `ENOUGH` observations; it rises after as many in two periods.

    It is halved for every two periods without observations: refused requests are never observed, so that a limit that
    was refused is tried again some time later. Another prefill worker may be faster: it is unknown again once one has
    come or gone.
    """

    PERIOD_S = 60.0
    ENOUGH = 8
    KEPT = 0.5

    def __init__(self) -> None:
        self._workers: dict[str, None] = {}
        self._reset()

    def _reset(self) -> None:
        self._least_s = self._before_s = math.inf  # in this period, and in the previous one
        self._num_least = self._num_before = self._num_observed = 0
        self._known_s = 0.0
        self._since_s = self._last_s = 0.0

    def add(self, worker_id: str) -> None:
        """A worker of the pool, perhaps a new one."""
        if worker_id not in self._workers:
            self._workers[worker_id] = None
            self._reset()

    def drop(self, worker_id: str) -> None:
        if worker_id in self._workers:
            del self._workers[worker_id]
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
