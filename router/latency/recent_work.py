"""How much work the workers of one pool were given lately, so that it can be kept even. Pure: time is an argument."""

from __future__ import annotations

import math

from router.policies.slo import GUARD

RECENT_S = 300.0  # after which work counts half
RECENT_EACH = 80  # or after so many newer requests for each worker: the busier a pool, the sooner it is even again


class RecentWork:
    """Work is in tokens to be read. Its clock counts halvings: time makes it go on, and so does each request."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[float, float]] = {}  # work, and when it counted as much
        self._halvings = 0.0
        self._now = 0.0

    def clock(self, now: float) -> float:
        """Halvings since the beginning."""
        return self._halvings + max(0.0, now - self._now) / RECENT_S

    def give(self, worker_id: str, work: float, *, now: float) -> None:
        """A request was sent to a worker."""
        before, at = self.of(worker_id, now=now)
        self._halvings, self._now = self.clock(now) + 1 / (RECENT_EACH * len(self._given)), now
        self._given[worker_id] = (before * kept(self._halvings - at) + work, self._halvings)

    def of(self, worker_id: str, *, now: float) -> tuple[float, float]:
        """A worker's, and at which time of the clock it counted as much. A newcomer counts as if it had had so much
        less than the others that these are `GUARD` above their mean: it is not owed what they did before it came, and
        what they have cached does not keep everything away from it."""
        if worker_id not in self._given:
            at = self.clock(now)
            others = [work * kept(at - was) for work, was in self._given.values()]
            share = max(0.0, 1 - (len(others) + 1) * GUARD / (1 + GUARD))
            self._given[worker_id] = (share * sum(others) / len(others) if others else 0.0, at)
        return self._given[worker_id]

    def drop(self, worker_id: str) -> None:
        """A worker has left."""
        self._given.pop(worker_id, None)


def whole(work: float, at: float) -> tuple[float, float]:
    """The same work as of the last whole halving: what is left of it at any time is then a power of two, and a factor
    that is the same for all (`since_whole`)."""
    before = math.floor(at)
    return work / kept(at - before), float(before)


def since_whole(clock: float) -> tuple[float, int]:
    """What is left of work as of the last whole halving, and which one that was."""
    before = math.floor(clock)
    return kept(clock - before), before


def kept(halvings: float) -> float:
    """What is left of one after so many of them."""
    return float(0.5**halvings)
