"""Records of workers' processes that survive their supervisors."""

from __future__ import annotations

from dataclasses import dataclass

from protos.values import WorkerInfo


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
