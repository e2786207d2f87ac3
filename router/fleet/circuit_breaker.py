"""Pauses routing to a worker that is reachable and healthy but fails its requests. Pure.

closed ── MAX_FAILURES in a row ──▶ open ── its pause is over ──▶ on trial ── SUCCESSES in a row ──▶ closed
                                     ▲                               │
                                     └─────────── a failure ─────────┘   the pause doubles, up to MAX_PAUSE_S

Other gateway processes publish how often the worker has failed them in a row. Recent failures of all processes are
added up, also on trial: MAX_FAILURES together open the breaker. After a success, a process counts from one again.
"""

from __future__ import annotations

MAX_FAILURES = 5
SUCCESSES = 2
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0
RECENT_S = 60.0
"""Age at which a failure no longer counts together with other processes' failures. Longer than any pause."""


class CircuitBreaker:
    """The circuit breaker of one worker."""

    def __init__(self) -> None:
        self.failures = 0
        """Counts failures in a row, in this process."""
        self._failed_s = 0.0
        self._published: dict[int, tuple[int, float]] = {}  # by process: failures in a row, and when reported
        self._successes = 0
        self._until_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def allows(self, now: float) -> bool:
        """Whether the worker may get requests. A worker on trial may: a request that fails resumes on another
        worker."""
        return self._until_s is None or now >= self._until_s

    def failed(self, now: float) -> bool:
        """Counts a request that failed, possibly because of the worker. True if a pause begins."""
        self._successes = 0
        self.failures += 1
        self._failed_s = now
        if self._until_s is None and self.failures + self._elsewhere(now) < MAX_FAILURES:
            return False
        return self._pause(now)

    def failed_elsewhere(self, now: float, *, process: int, in_row: int) -> bool:
        """Counts another process's failure, its `in_row`-th without a success. True if a pause begins."""
        self._published[process] = in_row, now
        own = self.failures if now - self._failed_s < RECENT_S else 0
        if own + self._elsewhere(now) < MAX_FAILURES:
            return False
        return self._pause(now)

    def succeeded(self) -> None:
        """Records that a request got tokens from the worker."""
        self.failures = 0
        self._published.clear()
        if self._until_s is None:
            return
        self._successes += 1
        if self._successes >= SUCCESSES:
            self.reset()

    def reset(self) -> None:
        """Drops all failures: the worker has restarted, or has passed its trial."""
        self.failures = self._successes = 0
        self._published.clear()
        self._until_s, self._pause_s = None, FIRST_PAUSE_S

    def _elsewhere(self, now: float) -> int:
        return sum(in_row for in_row, published_s in self._published.values() if now - published_s < RECENT_S)

    def _pause(self, now: float) -> bool:
        if self._until_s is not None:
            if now < self._until_s:
                return False  # the request was sent before the pause began
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._until_s = now + self._pause_s
        return True
