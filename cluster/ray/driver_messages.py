"""Messages between the serving process and the process that loads Ray's library, over a socket pair of their own.

parent ─▶ driver     BeginDriver, RayCall, CancelCall, StopRay, Ping
driver ─▶ parent     RayUp, RayAway, RayAnswer, LogLine, ProcessFailed, Pong
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.config.cluster_config import RayConfig
from cluster.process.channel import Ping, Pong, ProcessFailed
from cluster.ray.machine_part import MachinePart
from protos.codec import Messages
from protos.values import ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginDriver:
    """`folder`: the cluster's; `lock`: a file there that the parent locks while it lives, "" if workers outlive the
    parent. `was_up`: an earlier driver had a Ray. `part`: of this machine, None for all of it."""

    config: RayConfig
    folder: str
    lock: str
    orphan_s: float
    was_up: bool = False
    part: MachinePart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCall:
    """A call of a method of `RayCalls`, answered by RayAnswer with the same number."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelCall:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAnswer:
    number: int
    value: Any = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRay:
    """The driver and its Ray end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """`fields`: those of `cluster.process.logs.FIELDS` that the record has."""

    name: str
    level: int
    message: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayUp:
    """Ray is there, and calls are answered from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAway:
    """`reason`: the fault of Ray; "" if a suspected one is over."""

    reason: str


DRIVER_MESSAGES = Messages.of(
    BeginDriver, RayCall, CancelCall, RayAnswer, StopRay, LogLine, RayUp, RayAway, ProcessFailed, Ping, Pong
)
