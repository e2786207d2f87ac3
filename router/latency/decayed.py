"""Sums of observations in which recent observations count most. Pure: time is an argument."""

from __future__ import annotations

import math


class Decayed:
    """Half of each sum remains after `half_life_s`, and after `half_count` further observations."""

    def __init__(self, num_sums: int = 1, *, half_life_s: float, half_count: float = math.inf) -> None:
        self.sums = [0.0] * num_sums
        self._half_life_s = half_life_s
        self._each = 1 / half_count
        self._since_s = 0.0

    def at(self, now: float) -> list[float]:
        """The sums at the time `now`: the share of them that remains."""
        return self._left(max(0.0, now - self._since_s) / self._half_life_s)

    def age(self, now: float) -> None:
        """Ages the sums to the time `now`, as for one more observation. Call it before `add`."""
        self.sums = self._left(self._each + max(0.0, now - self._since_s) / self._half_life_s)
        self._since_s = now

    def add(self, *values: float) -> None:
        self.sums = [total + value for total, value in zip(self.sums, values, strict=True)]

    def _left(self, halvings: float) -> list[float]:
        share = 0.5**halvings
        return [total * share for total in self.sums]
