"""Messages between the serving process and the supervisor's process, over a socket pair of their own.

parent ─▶ supervisor     Begin, ProcessEnded, Resize, Drain, StopWorkers, Ping
supervisor ─▶ parent     LogLine, Step, Planned, Record, Viewed, WorkerStarting, WorkerJoined, WorkerLeft, RayAway,
                         Failed, Resized, Drained, WorkersStopped, Pong
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.config.cluster_config import ClusterConfig
from cluster.process.channel import Ping, Pong, ProcessFailed
from cluster.ray.machine_part import MachinePart
from cluster.supervision.living import LivingWorker
from cluster.supervision.supervisor import SupervisedWorker
from cluster.supervision.worker_placement import WorkerPlan
from protos.codec import Messages
from protos.values import ErrorInfo, WorkerRole
from router.fleet.successors import Successor
from router.fleet_owner import Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """`plans`, `leaving` and `living` are from a supervisor that ended before its workers; `is_planned`: there was
    one, so that no plans mean a fleet that is asleep. `revision`: of workers that are planned. `folder` is the
    cluster's on this machine; `lock` is a file in it that the parent locks while it lives, "" if the workers outlive
    it. `part`: of this machine, None for all of it."""

    config: ClusterConfig
    folder: str
    lock: str
    plans: tuple[WorkerPlan, ...] = ()
    is_planned: bool = False
    revision: Revision = field(default_factory=Revision)
    leaving: tuple[WorkerPlan, ...] = ()
    living: tuple[LivingWorker, ...] = ()
    have_served: tuple[str, ...] = ()
    part: MachinePart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """A rank's process on this machine has ended. `status`: its exit code, or a signal as a negative number."""

    pid: int
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The desired number of workers of each role with this `revision`, how many with others stay (`kept`), and the
    workers that change their roles. Answered by Planned if the machines can hold it, and by Resized when exactly these
    workers serve."""

    number: int
    counts: dict[WorkerRole, int]
    flips: dict[str, WorkerRole] = field(default_factory=dict)
    revision: Revision = field(default_factory=Revision)
    kept: dict[WorkerRole, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """The Resize with this number is reached, or a later one has replaced it. `error`: a worker that will never start,
    or a size that the machines cannot hold."""

    number: int
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Gives no worker new work; answered by Drained when running requests have finished, or after `grace_s`."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """Answered by WorkersStopped; then the supervisor and its Ray end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """`fields`: those of `cluster.process.logs.FIELDS` that the record has."""

    name: str
    level: int
    message: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupStep:
    """A slow step other than a worker's start has begun or ended."""

    what: str
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The desired state. `number`: of the Resize that it answers."""

    plans: tuple[WorkerPlan, ...]
    number: int = 0


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
class WorkerJoined:
    worker_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAway:
    """`reason`: the fault of Ray; "" while Ray is there and every worker has its place."""

    reason: str


SUPERVISOR_MESSAGES = Messages.of(
    Begin, ProcessEnded, Resize, Resized, Drain, StopWorkers, Ping, LogLine, StartupStep, Planned, WorkerRecorded,
    Viewed, WorkerStarting, WorkerJoined, WorkerLeft, RayAway, ProcessFailed, Drained, WorkersStopped, Pong,
)  # fmt: skip
