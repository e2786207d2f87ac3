"""Finds out whether a worker is stuck: it has work and has not finished a step for too long. A simulator uses the same
rule."""

from __future__ import annotations

from protos.values import Health
from workers.engine.engine import Engine


class StepProgress:
    """The progress of an engine. `ThreadedEngineLoop`, or a simulator's loop, updates it at every turn. Time is an
    argument."""

    def __init__(self, *, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._since_s = now
        self._working = False

    def resting(self) -> None:
        self._working = False

    def working(self, now: float) -> None:
        if not self._working:
            self._working, self._since_s = True, now

    def turned(self, engine: Engine, *, stepped: bool, now: float) -> None:
        """Records a turn of the engine. A worker that only has tickets is not stuck: tickets wait for other workers
        under leases."""
        if stepped or not engine.scheduler.has_requests():
            self._since_s = now

    def idle_s(self, now: float) -> float:
        return now - self._since_s

    def health(self, now: float) -> Health:
        idle_s = self.idle_s(now)
        if self._working and idle_s > self._stall_s:
            return Health(healthy=False, reason=f"no step finished for {idle_s:.0f} s", since_last_step_s=idle_s)
        return Health(healthy=True, since_last_step_s=idle_s if self._working else 0.0)
