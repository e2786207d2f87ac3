"""A worker's processes as they are remembered over the ends of their supervisors."""

from __future__ import annotations

from dataclasses import dataclass

from protos.values import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingWorker:
    """`host` is what Ray calls its machine, "" of the one that everything runs on; `devices` are the GPUs of each rank;
    `names` and `pids` are its ranks'. `info`: it serves."""

    worker_id: str
    incarnation: int
    host: str
    devices: tuple[str, ...]
    names: tuple[str, ...]
    pids: tuple[int, ...]
    info: WorkerInfo | None = None
