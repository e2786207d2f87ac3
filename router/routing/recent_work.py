"""The recent work of each worker of a pool, with which `slo` keeps the pool even. Pure: time is an argument."""

from __future__ import annotations

import math

import numpy as np

from router.routing.candidate_columns import Numbers
from router.routing.slo import GUARD

RECENT_S = 300.0  # age at which work counts half
RECENT_EACH = 80  # newer requests per worker after which work counts half, so that a busy pool becomes even sooner


class RecentWork:
    """The recent work of a pool's workers, in prompt tokens. The clock counts halvings: it advances with time and with
    each request."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[float, float]] = {}  # work, and its time on the clock
        self._halvings = 0.0
        self._now = 0.0

    def clock(self, now: float) -> float:
        return self._halvings + max(0.0, now - self._now) / RECENT_S

    def give(self, worker_id: str, work: float, *, now: float) -> None:
        before, at = self.of(worker_id, now=now)
        self._halvings, self._now = self.clock(now) + 1 / (RECENT_EACH * len(self._given)), now
        self._given[worker_id] = (before * kept(self._halvings - at) + work, self._halvings)

    def of(self, worker_id: str, *, now: float) -> tuple[float, float]:
        """A worker's work, and its time on the clock. A new worker starts with a share of the mean work, so that the
        pool does not send everything to it. The others are then `GUARD` above the mean, so that their caches do not
        keep all requests away from it."""
        if worker_id not in self._given:
            at = self.clock(now)
            others = [work * kept(at - was) for work, was in self._given.values()]
            share = max(0.0, 1 - (len(others) + 1) * GUARD / (1 + GUARD))
            self._given[worker_id] = (share * sum(others) / len(others) if others else 0.0, at)
        return self._given[worker_id]

    def drop(self, worker_id: str) -> None:
        self._given.pop(worker_id, None)


def whole(work: float, at: float) -> tuple[float, float]:
    """Converts the work to the time of the last whole halving. The work that remains at any time is then a power of two
    times a factor that all workers share (`since_whole`)."""
    before = math.floor(at)
    return work / kept(at - before), float(before)


def since_whole(clock: float) -> tuple[float, int]:
    before = math.floor(clock)
    return kept(clock - before), before


def halved(share: Numbers, halvings: Numbers) -> Numbers:
    if isinstance(share, np.ndarray):
        return np.ldexp(share, halvings.astype(np.intc))
    return math.ldexp(share, int(halvings))


def kept(halvings: float) -> float:
    return float(0.5**halvings)
