"""The time of a first token besides its prefill. No worker can meet a shorter limit."""

from __future__ import annotations

import math


class TtftOverhead:
    """The least time of recent first tokens on idle workers, besides their prefill: steps, calls, the gateway itself.
    It is unknown (0) before `ENOUGH` observations, and it rises after as many in two periods.

    It is halved for every two periods without observations: a refused request is not observed, so the limit that caused
    the refusal must become possible again. It becomes unknown when a worker joins or leaves, because another worker may
    be faster.
    """

    PERIOD_S = 60.0
    ENOUGH = 8
    KEPT = 0.5

    def __init__(self) -> None:
        self._workers: dict[str, None] = {}
        self._reset()

    def _reset(self) -> None:
        self._least_s = self._before_s = math.inf  # of this period, and of the previous one
        self._num_least = self._num_before = self._num_observed = 0
        self._known_s = 0.0
        self._since_s = self._last_s = 0.0

    def add(self, worker_id: str) -> None:
        if worker_id not in self._workers:
            self._workers[worker_id] = None
            self._reset()

    def drop(self, worker_id: str) -> None:
        if worker_id in self._workers:
            del self._workers[worker_id]
            self._reset()

    def observe(self, seconds: float, *, prefill_s: float, now: float) -> None:
        """Records a first token after `seconds`, of which prefill should take `prefill_s`. An observation with mostly
        prefill is ignored: the rest is noise of the prefill speed."""
        beside_s = seconds - prefill_s
        if prefill_s > beside_s:
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
