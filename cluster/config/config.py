"""A whole deployment as one frozen value: how many workers of which kind, on what, behind which addresses.

`cluster.config.settings` makes it from a TOML file and flags. What cannot work raises
Misconfigured here, naming the setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from decode_pool.config import DecodeConfig
from kvtransfer.config import LaneConfig
from prefill_pool.config import PrefillConfig
from protos.errors import BadCheckpoint, Misconfigured
from protos.hints import NO_GGUF, counted
from protos.tls import FaceTls, PeerTls
from protos.values import WorkerRole
from router.config import RouterConfig
from workers.config import WorkerConfig

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)  # meta-llama/Llama-3.1-8B
MEMORY = "memory"
MAX_WORKERS = 4096
MAX_PROCESSES = 64
MIN_SILENT_S = 2.0
_LEAST = {
    "first_delay_s": 0.0, "factor": 1.0, "reset_after_s": 0.0, "health_period_s": 0.1, "max_misses": 1, "grace_s": 0.0,
    "orphan_s": 10.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsConfig:
    """How many workers each pool has: prefill and decode (1 each unless said otherwise), or colocated ones that do
    both. `decode` workers without `prefill` ones read their prompts themselves. A worker of a pool has `prefill_tp` or
    `decode_tp` tensor-parallel ranks, or as many as all workers have (`worker.tp`)."""

    prefill: int | None = None
    decode: int | None = None
    colocated: int = 0
    prefill_tp: int | None = None
    decode_tp: int | None = None

    def __post_init__(self) -> None:
        for name in ("prefill_tp", "decode_tp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Misconfigured(f"pools.{name} = {value}: give 1 or more", param=name)
        for name in ("prefill", "decode", "colocated"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_WORKERS:
                raise Misconfigured(f"pools.{name} = {value}: give a number from 0 to {MAX_WORKERS}", param=name)
        if self.colocated and (self.prefill or self.decode):
            raise Misconfigured(
                f"pools: {counted(self.colocated, 'colocated worker')} and {self.prefill or 0} + {self.decode or 0} of "
                "prefill and decode: a cluster has either the former or the latter",
                param="colocated",
            )
        if not self.colocated and self.decode == 0:
            raise Misconfigured("pools.decode = 0: somebody must write the answers, so give at least 1", param="decode")

    def tp(self, role: WorkerRole, otherwise: int) -> int:
        """Ranks of a pool's workers, where it is not said for this pool alone: `otherwise`."""
        asked = {WorkerRole.PREFILL: self.prefill_tp, WorkerRole.DECODE: self.decode_tp}.get(role)
        return otherwise if asked is None else asked

    def counts(self) -> Mapping[WorkerRole, int]:
        if self.colocated:
            return {WorkerRole.COLOCATED: self.colocated}
        prefill = 1 if self.prefill is None else self.prefill
        decode = 1 if self.decode is None else self.decode
        return {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}

    def worker_ids(self) -> list[str]:
        """As `cluster.supervision.placement` names them."""
        return [f"{role}-{place}" for role, count in self.counts().items() for place in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """`address` of a running Ray cluster (host:port, ray://host:port, or auto); empty: one of our own on this machine.

    With `pool_resources` every rank also takes one of the custom Ray resource that has its pool's name, so that nodes
    are told apart by what they offer (deploy/k8s). A Ray that has not answered for `silent_s` is given up: a private
    one is started anew, and one at an address is connected to again; workers serve on.
    """

    address: str = ""
    pool_resources: bool = False
    silent_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.silent_s >= MIN_SILENT_S:
            raise Misconfigured(
                f"ray.silent_s = {self.silent_s}: give {MIN_SILENT_S:g} or more seconds", param="silent_s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """A worker that died is started again after `first_delay_s`, which grows by `factor` with every further death, up
    to `max_delay_s`; after `reset_after_s` of service its deaths are forgotten. Every `health_period_s` a worker is
    asked for its health: one that says no, or nothing, `max_misses` times in a row is dead too. At a stop, running
    requests have `grace_s` to finish. A worker on another machine ends by itself when no supervisor has been in contact
    for `orphan_s`; one on the machine of its `baton` process ends with that process."""

    first_delay_s: float = 0.25
    factor: float = 2.0
    max_delay_s: float = 30.0
    reset_after_s: float = 60.0
    health_period_s: float = 2.0
    max_misses: int = 5
    grace_s: float = 30.0
    orphan_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise Misconfigured(f"supervision.{name} = {getattr(self, name)}: give {least:g} or more", param=name)
        if not self.max_delay_s >= self.first_delay_s:
            raise Misconfigured(
                f"supervision.max_delay_s = {self.max_delay_s}: give first_delay_s = {self.first_delay_s:g} or more",
                param="max_delay_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """`index` says where the prefix index lives: in each gateway's memory alone, or shared through Redis (any URL of
    `router.prefix.redis_url`); `discovery` (redis://...) where supervisor and gateways meet when
    they are separate processes, and is not needed where they are one. The gateway is `processes` processes behind the
    same ports."""

    worker: WorkerConfig
    router: RouterConfig
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    tls: FaceTls = field(default_factory=FaceTls)
    peers: PeerTls = field(default_factory=PeerTls)
    index: str = MEMORY
    discovery: str = ""
    processes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= MAX_PROCESSES:
            raise Misconfigured(
                f"processes = {self.processes}: give a number from 1 to {MAX_PROCESSES}", param="processes"
            )
        if self.index != MEMORY:
            _check_index(self.index)
        if self.discovery and not self.discovery.startswith(("redis://", "rediss://")):
            raise Misconfigured(f"discovery: {self.discovery!r}: give redis://host:port", param="discovery")
        if self.router.port and self.router.port == self.router.grpc_port:
            raise Misconfigured(
                f"port and grpc_port are both {self.router.port}: give two, or 0 for any free one", param="grpc_port"
            )

    @property
    def lanes(self) -> LaneConfig:
        return self.worker.lanes

    def with_token(self) -> ClusterConfig:
        """The same with a token for this run, unless one is given."""
        return replace(self, peers=self.peers.with_token())

    def check_model(self) -> None:
        """Raises BadCheckpoint when there is no checkpoint where the model should be on this machine."""
        folder = Path(self.worker.model)
        if not folder.is_dir():
            raise BadCheckpoint(f"model: {_no_folder(folder)}", param="model")
        if not (folder / "config.json").is_file():
            if gguf := sorted(path.name for path in folder.glob("*.gguf")):
                raise BadCheckpoint(f"model: {folder} holds {gguf[0]}: {NO_GGUF}", param="model")
            raise BadCheckpoint(
                f"model: {folder} has no config.json, so it is no checkpoint's folder: give --model the one that holds "
                "config.json and the weights (*.safetensors)",
                param="model",
            )


def _no_folder(path: Path) -> str:
    if path.suffix.lower() == ".gguf":
        return f"{path}: {NO_GGUF}"
    if path.exists():
        return f"{path} is a file: give --model the folder that it lies in"
    told = f"there is no folder {path}: give --model a checkpoint's folder"
    if _HUB_NAME.fullmatch(str(path)):
        told += f"; Baton downloads nothing, as `hf download {path} --local-dir FOLDER` does"
    return told


def _check_index(where: str) -> None:
    if "://" not in where:
        raise Misconfigured(f"index: {where!r} is no index: use {MEMORY}, or redis://host:port", param="index")
    from router.prefix.redis_url import parse  # redis-py, for those who use it

    parse(where, setting="index")
