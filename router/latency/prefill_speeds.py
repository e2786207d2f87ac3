"""How fast workers compute prompts by their own reports, and which of them are slower than their pool beyond chance.

A report is an average over the worker's latest steps, with the fixed cost of a step: a worker that computes the ends of
cached prompts, or had a stall, seems slow. So only a speed far from the pool's mean counts as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.policies.table import Numbers, where

ALIKE = 2.0  # times as fast as another, within which workers are of one kind: the router learns what differs less


class PrefillSpeeds:
    """Of one pool's workers, in tokens a second."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}
        self._mean: float | None = 0.0
        self._last_mean = 0.0
        self._kinds: dict[str, int] = {}  # as of the last call of `slower`
        self._between = (0.0, math.inf)  # a mean that is neither at its ends nor beyond changes nobody's kind

    def report(self, worker_id: str, speed: float) -> None:
        """0 is none yet."""
        if speed and self._reported.get(worker_id) != speed:
            self._reported[worker_id], self._mean = speed, None

    def of(self, worker_id: str) -> float:
        """The latest report; 0 before the first."""
        return self._reported.get(worker_id, 0.0)

    @property
    def mean(self) -> float:
        """Of all reported speeds; 0 before the first."""
        if self._mean is None:
            self._mean = self._last_mean = sum(self._reported.values()) / len(self._reported) if self._reported else 0.0
        return self._mean

    def slower(self, worker_id: str) -> float:
        """How many times slower than the mean the worker reports to be; 1 if unknown. By the mean as last computed: a
        new mean for each worker that reports would cost too much."""
        speed = self.of(worker_id)
        slower = self._last_mean / speed if speed and self._last_mean else 1.0
        if speed:
            self._sort(worker_id, speed, _kind(slower))
        return slower

    def crossed(self) -> Sequence[str]:
        """Workers whose kind has changed with the speeds of others since `slower` was last called; each once."""
        mean, (low, high) = self.mean, self._between
        if not mean or low < mean < high:
            return ()
        self._between = (0.0, math.inf)
        found = []
        for worker_id, before in self._kinds.items():
            speed = self._reported[worker_id]
            if (kind := _kind(mean / speed)) != before:
                found.append(worker_id)
            self._sort(worker_id, speed, kind)
        return found

    def _sort(self, worker_id: str, speed: float, kind: int) -> None:
        self._kinds[worker_id] = kind
        low, high = self._between
        fast, slow = speed / ALIKE, speed * ALIKE  # where the mean makes it so
        self._between = (
            max(low, (fast, slow, 0.0)[kind]),
            min(high, (slow, math.inf, fast)[kind]),
        )

    def drop(self, worker_id: str) -> None:
        self._kinds.pop(worker_id, None)
        if self._reported.pop(worker_id, None) is not None:
            self._mean = None


def slowness(speed: Numbers, mean: Numbers) -> Numbers:
    """How many times slower than the mean: 1 of those like it, and of those unknown (NaN)."""
    times = mean / speed
    return where((times >= ALIKE) | (times * ALIKE <= 1), times, 1.0)


def _kind(slower: float) -> int:
    """Slow (1), fast (-1), or like the others (0)."""
    return 1 if slower >= ALIKE else -1 if slower * ALIKE <= 1 else 0


def counted(slower: float) -> float:
    """As a difference; 1 is none."""
    return slower if slower >= ALIKE or slower * ALIKE <= 1 else 1.0
