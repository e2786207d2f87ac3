"""When a dead worker is started again: the states of its lives, as pure transitions under the caller's clock.

           opened              failed                due
STARTING ─────────▶ SERVING ──────────▶ WAITING ─────────▶ STARTING   (a new incarnation each time)
    │                                      ▲
    └────────────── failed ────────────────┘      failed, and would fail again: FAILED_PERMANENTLY
                                                  drained, and ended: STARTING at once
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.config.cluster_config import SupervisionConfig
from protos.errors import BatonError, Misconfigured


class LifeState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting"
    FAILED_PERMANENTLY = "failed permanently"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The state of a worker since `since_s`. `num_failures` counts failures in a row; `due_s`: when to start it again.

    `has_served`: an incarnation has been ready once, so its settings work. `start_s`: how long the latest start took.
    """

    state: LifeState = LifeState.STARTING
    since_s: float
    num_failures: int = 0
    due_s: float = 0.0
    reason: str = ""
    has_served: bool = False
    start_s: float = 0.0


def initial(now: float, *, has_served: bool = False) -> Life:
    return Life(since_s=now, has_served=has_served)


def opened(life: Life, now: float) -> Life:
    assert life.state is LifeState.STARTING, life.state
    return replace(life, state=LifeState.SERVING, since_s=now, reason="", has_served=True, start_s=now - life.since_s)


def drained(life: Life, now: float) -> Life:
    """A drained worker has ended in order: the next incarnation starts immediately."""
    assert life.state is LifeState.SERVING, life.state
    return replace(life, state=LifeState.STARTING, since_s=now, num_failures=0)


def failed(life: Life, error: BatonError, now: float, config: SupervisionConfig) -> Life:
    """Waits before the next start, or becomes FAILED_PERMANENTLY: settings that never worked will not work next
    time."""
    assert life.state in (LifeState.STARTING, LifeState.SERVING), life.state
    if isinstance(error, Misconfigured) and not life.has_served:
        return replace(life, state=LifeState.FAILED_PERMANENTLY, since_s=now, reason=error.message)
    served_s = now - life.since_s if life.state is LifeState.SERVING else 0.0
    failures = life.num_failures + 1 if served_s < config.backoff_reset_s else 1
    return replace(
        life,
        state=LifeState.WAITING,
        since_s=now,
        num_failures=failures,
        due_s=now + delay_s(failures, config),
        reason=error.message,
    )


def restarted(life: Life, now: float) -> Life:
    assert life.state is LifeState.WAITING, life.state
    return replace(life, state=LifeState.STARTING, since_s=now)


def delay_s(num_failures: int, config: SupervisionConfig) -> float:
    """Seconds to wait after this many failures in a row (at least one)."""
    delay, room = config.initial_backoff_s, config.max_backoff_s
    for _ in range(num_failures - 1):
        if delay >= room or config.backoff_factor == 1.0 or delay == 0.0:
            break
        delay *= config.backoff_factor
    return min(delay, room)
