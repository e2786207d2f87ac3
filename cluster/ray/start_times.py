"""How long workers' starts took lately."""

from __future__ import annotations

import statistics
from collections import deque

from cluster.supervision.lifecycle import LifeState
from cluster.supervision.supervisor import SupervisedWorker

NUM_STARTS = 8


class StartTimes:
    """Call `note` with each view of a worker. `median_s`: of the latest starts, 0 before the first."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=NUM_STARTS)
        self._launched_s: dict[str, tuple[int, float]] = {}  # incarnations that are starting, and since when

    @property
    def median_s(self) -> float:
        return statistics.median(self._took_s) if self._took_s else 0.0

    def note(self, view: SupervisedWorker, now: float) -> None:
        if view.life.state is LifeState.STARTING:
            if self._launched_s.get(view.worker_id, (0, 0.0))[0] != view.incarnation:
                self._launched_s[view.worker_id] = (view.incarnation, now)
            return
        incarnation, since_s = self._launched_s.pop(view.worker_id, (0, 0.0))
        if view.life.state is LifeState.SERVING and incarnation == view.incarnation:
            self._took_s.append(now - since_s)
