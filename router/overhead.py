"""What comes to every first token besides the reading of its prompt: a bound below it cannot be met by anybody."""

from __future__ import annotations

import math


class Overhead:
    """The least that lately came to a first token on an idle worker beside the reading of its prompt: steps, calls, the
    gateway itself. It is not known (0) before `ENOUGH` observations. Once none has come for twice `PERIOD_S` it may
    have become less, by half and no more: what was far from possible is not let through because nobody has asked."""

    PERIOD_S = 60.0
    ENOUGH = 8
    KEPT = 0.5

    def __init__(self) -> None:
        self._least_s = self._before_s = math.inf  # in this period, and in the one before it
        self._kept_s = 0.0
        self._since_s = 0.0
        self._num_observed = 0

    def observe(self, seconds: float, *, reading_s: float, now: float) -> None:
        """A first token came after so long, of which its reading should take so much. Where that is the larger part
        the rest is chance in the speed: it says nothing."""
        beside_s = seconds - reading_s
        if reading_s > beside_s:
            return
        self._turn(now)
        self._least_s = min(self._least_s, beside_s)
        self._kept_s = min(self._kept_s, beside_s)
        self._num_observed += 1

    def at(self, now: float) -> float:
        self._turn(now)
        least_s = min(self._least_s, self._before_s)
        return least_s if self._num_observed >= self.ENOUGH and least_s < math.inf else self._kept_s

    def _turn(self, now: float) -> None:
        if now < self._since_s + self.PERIOD_S:
            return
        known_s = min(self._least_s, self._before_s)
        self._before_s = self._least_s if now < self._since_s + 2 * self.PERIOD_S else math.inf
        if self._before_s == math.inf:
            if self._num_observed >= self.ENOUGH and known_s < math.inf:
                self._kept_s = self.KEPT * known_s
            self._num_observed = 0
        self._least_s, self._since_s = math.inf, now
