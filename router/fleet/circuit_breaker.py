"""Pauses routing to a worker that is reachable and healthy but fails its requests. Pure.

closed ── MAX_FAILURES in a row ──▶ open ── its pause is over ──▶ on trial ── SUCCESSES in a row ──▶ closed
                                     ▲                               │
                                     └─────────── a failure ─────────┘   the pause doubles, up to MAX_PAUSE_S
"""

from __future__ import annotations

MAX_FAILURES = 5
SUCCESSES = 2
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0


class CircuitBreaker:
    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._successes = 0
        self._until_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def allows(self, now: float) -> bool:
        """Whether the worker may get requests. A worker on trial may: a request that fails resumes on another
        worker."""
        return self._until_s is None or now >= self._until_s

    def failed(self, now: float) -> bool:
        self._successes = 0
        self._failures += 1
        if self._until_s is None and self._failures < MAX_FAILURES:
            return False
        if self._until_s is not None:
            if now < self._until_s:
                return False  # the request was sent before the pause began
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._until_s = now + self._pause_s
        return True

    def succeeded(self) -> None:
        self._failures = 0
        if self._until_s is None:
            return
        self._successes += 1
        if self._successes >= SUCCESSES:
            self.reset()

    def reset(self) -> None:
        """Drops all failures: the worker has restarted, or has passed its trial."""
        self._failures = self._successes = 0
        self._until_s, self._pause_s = None, FIRST_PAUSE_S
