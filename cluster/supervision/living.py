"""Records of workers' processes that survive their supervisors, and of a fleet that survives its `baton pools`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.supervision.worker_placement import WorkerPlan
from protos.tls import PeerTls
from protos.values import WorkerInfo
from workers.worker_config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingWorker:
    """`hosts`: Ray's name for the machine of each rank, "" for the supervisor's machine. `devices`: the GPUs of each
    rank. `names` and `pids`: its ranks' processes. `info`: set once it serves."""

    worker_id: str
    incarnation: int
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    names: tuple[str, ...]
    pids: tuple[int, ...]
    info: WorkerInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingFleet:
    """The record that a controller leaves to the next one. `folder`: the name of the folder with the ranks' sockets.
    `worker`: the settings with which the first revision was started."""

    folder: str
    ray_address: str
    peers: PeerTls
    worker: WorkerConfig
    plans: tuple[WorkerPlan, ...]
    leaving: tuple[WorkerPlan, ...]
    living: tuple[LivingWorker, ...]
    have_served: tuple[str, ...]
