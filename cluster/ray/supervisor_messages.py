"""What the process that serves and the supervisor's process send each other, over a pair of sockets that no other has.

parent ─▶ supervisor     Begin, ProcessEnded, Resize, Drain, StopWorkers, Ping
supervisor ─▶ parent     LogLine, Step, Planned, Record, Viewed, WorkerStarting, WorkerJoined, WorkerLeft, RayAway,
                         Failed, Resized, Drained, WorkersStopped, Pong
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config.config import ClusterConfig, PoolsConfig
from cluster.gateway.messages import Ping, Pong, ProcessFailed, WorkerJoined, WorkerLeft
from cluster.supervision.living import LivingWorker
from cluster.supervision.placement import WorkerPlan
from cluster.supervision.supervisor import SupervisedWorker
from protos.codec import Messages
from protos.values import ErrorInfo
from router.fleet.successors import Successor


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """`plans`, `leaving` and `living` are of a supervisor that has ended before its workers. `folder` is the cluster's
    on this machine; `lock` is a file in it that the parent holds as long as it lives."""

    config: ClusterConfig
    folder: str
    lock: str
    plans: tuple[WorkerPlan, ...] = ()
    leaving: tuple[WorkerPlan, ...] = ()
    living: tuple[LivingWorker, ...] = ()
    have_served: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """A rank's process of this machine. `status`: its exit code, or a signal as a negative number."""

    pid: int
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """How many workers are desired; answered by Resized when they serve and the others are gone."""

    pools: PoolsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """`error`: of a worker that will never start, or of a size that the machines cannot hold."""

    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """No new work for any worker; answered by Drained when what runs has finished, or after `grace_s`."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Answered by WorkersStopped; then the supervisor ends, and its Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """`fields` are those of `cluster.process.logs.FIELDS` that the record has."""

    name: str
    level: int
    message: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupStep:
    """Something besides the workers that takes its time has begun, or is over."""

    what: str
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The desired state."""

    plans: tuple[WorkerPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecorded:
    """A worker's processes are about to be started, or more is known of them."""

    living: LivingWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewed:
    view: SupervisedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarting:
    worker_id: str
    successor: Successor


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAway:
    """`reason` says what is wrong with Ray; "": it is there, and every worker has its place."""

    reason: str


SUPERVISOR_MESSAGES = Messages(
    {
        kind.__name__: kind
        for kind in (
            Begin, ProcessEnded, Resize, Resized, Drain, StopWorkers, Ping, LogLine, StartupStep, Planned,
            WorkerRecorded, Viewed, WorkerStarting, WorkerJoined, WorkerLeft, RayAway, ProcessFailed, Drained,
            WorkersStopped, Pong,
        )
    }
)  # fmt: skip
