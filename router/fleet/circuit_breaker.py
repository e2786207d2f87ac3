"""Keeps work away from a worker that is there, answers for its health, and fails what it is given. Pure.

closed ── MAX_FAILURES in a row ──▶ open ── its pause is over ──▶ on trial ── SUCCESSES in a row ──▶ closed
                                     ▲                               │
                                     └─────────── a failure ─────────┘   the pause doubles, up to MAX_PAUSE_S

Siblings, which give the same worker work, tell how often it has failed them in a row. That counts as well while it is
recent: all of it together must be MAX_FAILURES, on trial as well. A success of theirs shows in that they begin at one.
"""

from __future__ import annotations

MAX_FAILURES = 5
SUCCESSES = 2
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0
RECENT_S = 60.0
"""A failure that is older than this does not count beside one that a sibling publishes. Longer than any pause."""


class CircuitBreaker:
    """One worker's."""

    def __init__(self) -> None:
        self.failures = 0
        """Of our own, in a row."""
        self._failed_s = 0.0
        self._told: dict[int, tuple[int, float]] = {}  # by sibling: its own in a row, and when it said so
        self._successes = 0
        self._until_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def allows(self, now: float) -> bool:
        """May the worker be given work? On trial it may: what fails there goes on elsewhere."""
        return self._until_s is None or now >= self._until_s

    def failed(self, now: float) -> bool:
        """A request failed there, for a reason that may be the worker's. Does a pause begin with it?"""
        self._successes = 0
        self.failures += 1
        self._failed_s = now
        if self._until_s is None and self.failures + self._elsewhere(now) < MAX_FAILURES:
            return False
        return self._pause(now)

    def failed_elsewhere(self, now: float, *, sibling: int, in_row: int) -> bool:
        """A sibling's request failed there, its `in_row`-th without a success. Does a pause begin with it?"""
        self._told[sibling] = in_row, now
        own = self.failures if now - self._failed_s < RECENT_S else 0
        if own + self._elsewhere(now) < MAX_FAILURES:
            return False
        return self._pause(now)

    def succeeded(self) -> None:
        """A request got tokens from there."""
        self.failures = 0
        self._told.clear()
        if self._until_s is None:
            return
        self._successes += 1
        if self._successes >= SUCCESSES:
            self.reset()

    def reset(self) -> None:
        """It is another worker now, or has proved itself."""
        self.failures = self._successes = 0
        self._told.clear()
        self._until_s, self._pause_s = None, FIRST_PAUSE_S

    def _elsewhere(self, now: float) -> int:
        return sum(in_row for in_row, told_s in self._told.values() if now - told_s < RECENT_S)

    def _pause(self, now: float) -> bool:
        if self._until_s is not None:
            if now < self._until_s:
                return False  # it was given before the pause began
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._until_s = now + self._pause_s
        return True
