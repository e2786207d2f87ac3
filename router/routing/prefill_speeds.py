"""The speeds at which workers compute prompts, and which workers differ from their pool beyond chance.

A worker reports an average over its latest steps, including the fixed cost of a step. A worker that computed the ends
of cached prompts, or had a stall, therefore seems slow. So only a speed far from the pool's mean counts as different.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.routing.candidate_columns import Numbers, where

ALIKE = 2.0  # speeds within this ratio count as equal: the router learns smaller differences


class PrefillSpeeds:
    """The prefill speeds that one pool's workers report, in tokens per second."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}
        self._mean: float | None = 0.0
        self._last_mean = 0.0
        self._kinds: dict[str, int] = {}  # at the last call of `slower`
        self._between = (0.0, math.inf)  # no worker's kind changes while the mean stays inside

    def report(self, worker_id: str, speed: float) -> None:
        if speed and self._reported.get(worker_id) != speed:
            self._reported[worker_id], self._mean = speed, None

    def of(self, worker_id: str) -> float:
        return self._reported.get(worker_id, 0.0)

    @property
    def mean(self) -> float:
        if self._mean is None:
            self._mean = self._last_mean = sum(self._reported.values()) / len(self._reported) if self._reported else 0.0
        return self._mean

    def slower(self, worker_id: str) -> float:
        """How many times slower than the mean the worker is by its reports; 1 if unknown. The mean is the last computed
        one: a new mean for each report would cost too much."""
        speed = self.of(worker_id)
        slower = self._last_mean / speed if speed and self._last_mean else 1.0
        if speed:
            self._sort(worker_id, speed, _kind(slower))
        return slower

    def crossed(self) -> Sequence[str]:
        mean, (low, high) = self.mean, self._between
        if not mean or low < mean < high:
            return ()
        self._between = (0.0, math.inf)
        changed = []
        for worker_id, before in self._kinds.items():
            speed = self._reported[worker_id]
            if (kind := _kind(mean / speed)) != before:
                changed.append(worker_id)
            self._sort(worker_id, speed, kind)
        return changed

    def _sort(self, worker_id: str, speed: float, kind: int) -> None:
        self._kinds[worker_id] = kind
        low, high = self._between
        fast, slow = speed / ALIKE, speed * ALIKE  # the means at which the kind changes
        self._between = (max(low, (fast, slow, 0.0)[kind]), min(high, (slow, math.inf, fast)[kind]))

    def drop(self, worker_id: str) -> None:
        self._kinds.pop(worker_id, None)
        if self._reported.pop(worker_id, None) is not None:
            self._mean = None


def slowness(speed: Numbers, mean: Numbers) -> Numbers:
    """How many times slower than the mean a worker counts as: 1 within `ALIKE` of the mean, and for an unknown speed
    (NaN)."""
    times = mean / speed
    return where((times >= ALIKE) | (times * ALIKE <= 1), times, 1.0)


def _kind(slower: float) -> int:
    return 1 if slower >= ALIKE else -1 if slower * ALIKE <= 1 else 0


def counted(slower: float) -> float:
    return slower if slower >= ALIKE or slower * ALIKE <= 1 else 1.0
