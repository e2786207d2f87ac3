"""Messages between the supervisor of gateway processes and each of them, over a `cluster.process.channel` of their own.

supervisor ─▶ process     BeginProcess, WorkerStarts, WorkerJoined, WorkerLeft, ClusterDegraded, ProcessStatuses,
                          TenantEntered, FleetReply, Ping, StopProcess
process ─▶ supervisor     ProcessUp, ProcessReady, ProcessFailed, EnterTenant, TokensSpent, RequestEnded, FleetCall,
                          Pong, ProcessLeaving
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from cluster.capacity.calls import FleetCall, FleetReply
from cluster.config.config import ClusterConfig
from cluster.process.logs import LogFormat
from protos.codec import Messages
from protos.values import ErrorInfo
from router.auth.tenants import Tenant
from router.fleet.successors import Successor
from router.replicas.peers import ProcessStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginProcess:
    """The first message: process `number` of `count`. `addresses` of workers, or `config.discovery`, where the process
    looks for workers itself; without either the supervisor sends the workers."""

    config: ClusterConfig
    number: int
    count: int
    folder: Path
    log_format: LogFormat
    is_told: bool
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarts:
    """A process of the worker is being started, or (None) no longer announced."""

    worker_id: str
    successor: Successor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    worker_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDegraded:
    """The fault of the cluster behind the workers; "" if there is none."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatuses:
    """The states of all processes. `settled`: all have been ready once."""

    statuses: tuple[ProcessStatus, ...]
    settled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProcess:
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Answered with Pong, unless the process's event loop hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUp:
    """The process answers connections from now on."""

    model: str
    has_chat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReady:
    """The process can serve a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed:
    """The reason for which the process ends."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLeaving:
    """The process was signalled to stop and takes no more connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterTenant:
    """Requests admission for a tenant's request. Answered by the Entered with the same number."""

    number: int
    tenant: Tenant
    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantEntered:
    number: int
    refusal: ErrorInfo | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSpent:
    tenant: Tenant
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    tenant: Tenant
    request_id: str


Message = (
    BeginProcess | WorkerStarts | WorkerJoined | WorkerLeft | ClusterDegraded | ProcessStatuses | StopProcess | Ping
    | Pong | ProcessUp | ProcessReady | ProcessFailed | ProcessLeaving | EnterTenant | TenantEntered | TokensSpent
    | RequestEnded | FleetCall | FleetReply
)  # fmt: skip

CONTROL_MESSAGES = Messages.of(*get_args(Message))
