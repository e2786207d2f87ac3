"""Parts of this machine for several fleets, each of which has a private Ray of its own: no two get the same GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config.cluster_config import ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePart:
    """`gpus` as in CUDA_VISIBLE_DEVICES."""

    num_cpus: int
    gpus: tuple[str, ...] = ()


def parts(configs: Sequence[ClusterConfig], num_cpus: int, gpus: Sequence[str]) -> tuple[MachinePart, ...]:
    """Divides the machine: CPUs in proportion to each fleet's ranks, at least one; a GPU for every rank in the order of
    the fleets, and the rest for the first fleet, which may grow."""
    ranks = [num_ranks(config) for config in configs]
    free, given = list(gpus), []
    for config, count in zip(configs, ranks, strict=True):
        wanted = 0 if config.worker.device == "cpu" else count
        given.append(free[:wanted])
        free = free[wanted:]
    takers = [place for place, config in enumerate(configs) if config.worker.device != "cpu"]
    if takers:
        given[takers[0]] += free
    shares = [max(1, num_cpus * count // max(1, sum(ranks))) for count in ranks]
    return tuple(MachinePart(num_cpus=cpus, gpus=tuple(own)) for cpus, own in zip(shares, given, strict=True))


def num_ranks(config: ClusterConfig) -> int:
    return sum(config.pools.tp(role, config.worker.tp) * count for role, count in config.pools.counts().items())


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use: CUDA_VISIBLE_DEVICES, else what NVIDIA's tool lists."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(one.strip() for one in given.split(",") if one.strip() not in ("", "-1"))
    if (tool := shutil.which("nvidia-smi")) is None:
        return ()
    listed = subprocess.run(
        [tool, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
    )
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()
