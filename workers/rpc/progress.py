"""When a worker is stuck: with work at hand it finishes no step for too long. One rule, whoever takes the turns."""

from __future__ import annotations

from protos.values import Health
from workers.engine.engine import Engine


class StepProgress:
    """Told of every turn of an engine by whoever takes it (`EngineLoop`, or a simulator). Time is an argument."""

    def __init__(self, *, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._since_s = now
        self._working = False

    def resting(self) -> None:
        """There is nothing to do."""
        self._working = False

    def working(self, now: float) -> None:
        """There is something to do."""
        if not self._working:
            self._working, self._since_s = True, now

    def turned(self, engine: Engine, *, stepped: bool, now: float) -> None:
        """In a turn a step ended or began, or none could. A ticket waits for others, for as long as they
        renew it: that is no lack of progress."""
        if stepped or not engine.scheduler.has_requests():
            self._since_s = now

    def idle_s(self, now: float) -> float:
        return now - self._since_s

    def health(self, now: float) -> Health:
        idle_s = self.idle_s(now)
        if self._working and idle_s > self._stall_s:
            return Health(healthy=False, reason=f"no step finished for {idle_s:.0f} s", since_last_step_s=idle_s)
        return Health(healthy=True, since_last_step_s=idle_s if self._working else 0.0)
