"""A whole deployment as one frozen value: the number and kind of workers, their settings and addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.planner.planner import PlannerSettings
from cluster.planner.planner_config import PlannerConfig
from protos.errors import BadCheckpoint, Misconfigured
from protos.hints import counted
from protos.model_files.opening import open_model
from protos.setting import CheckedSettings, check_settings, setting
from protos.tls import FaceTls, PeerTls
from protos.values import WorkerRole
from router.router_config import RouterConfig
from workers.worker_config import WorkerConfig

MEMORY = "memory"
MAX_WORKERS = 4096
_FLEET = re.compile(r"([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsConfig:
    """Prefill and decode workers (1 each by default), or colocated workers, which do both. Decode workers without
    prefill workers compute their prompts themselves."""

    prefill: int | None = setting(
        None, "Number of prefill workers; default: 1; 0: decode workers prefill too.", least=0, most=MAX_WORKERS
    )
    decode: int | None = setting(None, "Number of decode workers; default: 1.", least=0, most=MAX_WORKERS)
    colocated: int = setting(0, "Number of workers that prefill and decode.", least=0, most=MAX_WORKERS)
    prefill_tp: int | None = setting(None, "Ranks of a prefill worker; default: worker.tp.", least=1)
    decode_tp: int | None = setting(None, "Ranks of a decode worker; default: worker.tp.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.colocated and (self.prefill or self.decode):
            raise Misconfigured(
                f"pools: {counted(self.colocated, 'colocated worker')} and {self.prefill or 0} + {self.decode or 0} of "
                "prefill and decode: give either the former or the latter",
                param="colocated",
            )
        if not self.colocated and self.decode == 0 and self.prefill != 0:
            raise Misconfigured(
                "pools.decode = 0: give at least 1, as prefill workers write no answers", param="decode"
            )

    def tp(self, role: WorkerRole, otherwise: int) -> int:
        """Ranks of each worker of a pool; `otherwise` if the pool has no setting of its own."""
        ranks = {WorkerRole.PREFILL: self.prefill_tp, WorkerRole.DECODE: self.decode_tp}.get(role)
        return otherwise if ranks is None else ranks

    def counts(self) -> Mapping[WorkerRole, int]:
        if self.colocated:
            return {WorkerRole.COLOCATED: self.colocated}
        prefill = 1 if self.prefill is None else self.prefill
        decode = 1 if self.decode is None else self.decode
        return {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}

    def with_counts(self, counts: Mapping[WorkerRole, int]) -> PoolsConfig:
        """The same pools with these numbers of workers, and no other roles."""
        return replace(
            self,
            prefill=counts.get(WorkerRole.PREFILL, 0),
            decode=counts.get(WorkerRole.DECODE, 0),
            colocated=counts.get(WorkerRole.COLOCATED, 0),
        )

    def worker_ids(self) -> list[str]:
        """By the names in `cluster.supervision.worker_placement`."""
        return [f"{role}-{place}" for role, count in self.counts().items() for place in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig(CheckedSettings):
    """A Ray that does not answer for this long is given up: a private Ray is started again, one at an address is
    connected to again. Workers keep serving."""

    address: str = setting(
        "", "A Ray that runs (host:port, ray://host:port or auto); empty: a private one.", flag="ray-address"
    )
    pool_resources: bool = setting(
        False, "Each rank takes one of the custom Ray resource with its pool's name (deploy/k8s)."
    )
    span_nodes: bool = setting(
        False, "Ranks of one worker may be on several nodes, where no node has room for all of them (--tp)."
    )
    downloads: bool = setting(
        False, "Machines of a running Ray download models of the Hugging Face hub, each to its own cache."
    )
    response_timeout_s: float = 15.0  # a Ray that has not answered for this long is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig(CheckedSettings):
    """When a worker counts as dead, when it is started again, and how it is stopped. A worker on the machine of its
    `baton serve` ends with that process."""

    initial_backoff_s: float = setting(0.25, "Pause before a dead worker is started again.", least=0, most=30)
    backoff_factor: float = 2.0  # each further death makes the pause longer by this factor
    max_backoff_s: float = 30.0  # longest pause
    backoff_reset_s: float = 60.0  # after this time of service earlier deaths do not count
    health_period_s: float = setting(2.0, "Time between two health checks of a worker.", least=0.1)
    max_failed_checks: int = 5  # a worker that fails as many checks in a row is dead
    roll_patience_s: float = setting(
        600.0, "Running answers of a model that `baton roll` replaces may take this long.", least=0
    )
    grace_s: float = setting(30.0, "Running requests may finish within this time at a stop.", least=0)
    orphan_timeout_s: float = setting(
        60.0, "A worker of `baton pools`, or on another machine, ends after this time without a supervisor.", least=10
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """`index` may be any URL of `router.prefix.redis_url`. `discovery` is not needed if one `baton` process runs both
    supervisor and gateway."""

    index: str = setting(MEMORY, "Prefix index: memory, or redis://host:port for gateways that share one.")
    discovery: str = setting("", "redis://host:port where supervisor and gateways meet.")
    fleet: str = setting(
        "", "Name of this model's fleet, by which its workers' names begin, where several share a Redis."
    )
    processes: int = setting(1, "Gateway processes behind the same ports.", least=1, most=64)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    worker: WorkerConfig
    router: RouterConfig
    ray: RayConfig = field(default_factory=RayConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    tls: FaceTls = field(default_factory=FaceTls)
    peers: PeerTls = field(default_factory=PeerTls)

    def __post_init__(self) -> None:
        check_settings(self)
        if not any(self.pools.counts().values()):
            raise Misconfigured(
                "pools.decode = 0 and no other worker: give at least 1; `baton scale` puts a running cluster to sleep",
                param="decode",
            )
        if self.index != MEMORY:
            _check_index(self.index)
        if not _FLEET.fullmatch(self.fleet):
            raise Misconfigured(
                f"fleet = {self.fleet!r}: give at most 40 of a to z, 0 to 9 and '-', none at the ends",
                param="fleet",
            )
        if self.discovery and not self.discovery.startswith(("redis://", "rediss://", "unix://")):
            raise Misconfigured(f"discovery = {self.discovery!r}: give redis://host:port", param="discovery")
        if self.discovery:
            _check_redis(self.discovery, "discovery")
        if self.router.port and self.router.port == self.router.grpc_port:
            raise Misconfigured(
                f"port and grpc_port are both {self.router.port}: give two, or 0 for any free one", param="grpc_port"
            )

    def planner_settings(self) -> PlannerSettings | None:
        """None without a planner. Raises Misconfigured."""
        if not self.planner.autoscale:
            return None
        counts, router = self.pools.counts(), self.router
        devices = {role: self.pools.tp(role, self.worker.tp) for role in counts}
        absent = [role for role, count in counts.items() if not count]
        return self.planner.settings(devices, ttft_ms=router.ttft_ms, tpot_ms=router.tpot_ms, absent=absent)

    def with_token(self) -> ClusterConfig:
        """The same configuration with a token for this run, unless it has one."""
        return replace(self, peers=self.peers.with_token())

    def check_model(self) -> None:
        """Raises BadCheckpoint if there is no model at its path on this machine."""
        try:
            open_model(self.worker.model)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"model: {error.message}", param="model") from error


def _check_index(where: str) -> None:
    if "://" not in where:
        raise Misconfigured(f"index: {where!r} is no index: use {MEMORY}, or redis://host:port", param="index")
    _check_redis(where, "index")


def _check_redis(url: str, setting: str) -> None:
    from router.prefix.redis_url import parse  # only used with a Redis URL

    parse(url, setting=setting)
