"""Plans which worker gets which share of the machines. Pure; Ray then reserves the shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.config.config import PoolsConfig
from protos.errors import Misconfigured
from protos.hints import counted
from protos.values import WorkerRole
from workers.config import Device

MAX_CPUS_PER_RANK = 1.0  # what Ray reserves; a rank's threads decide how many cores it uses


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """The resources of one machine of a Ray cluster."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: `num_ranks` processes on one node, each with these shares of it and `num_threads` torch threads.

    `pool_resource` names a custom Ray resource of which each rank takes one.
    """

    worker_id: str
    role: WorkerRole
    device: Literal["cpu", "cuda"]
    num_ranks: int
    cpus_per_rank: float
    gpus_per_rank: int
    num_threads: int
    pool_resource: str = ""

    def bundles(self) -> list[dict[str, float]]:
        """The resources of each rank's bundle in the placement group, in rank order."""
        bundle = {"CPU": self.cpus_per_rank} if self.cpus_per_rank else {"memory": 1.0}  # Ray refuses an empty one
        if self.gpus_per_rank:
            bundle["GPU"] = float(self.gpus_per_rank)
        if self.pool_resource:
            bundle[self.pool_resource] = 1.0
        return [dict(bundle) for _ in range(self.num_ranks)]


def plan(
    pools: PoolsConfig, nodes: Sequence[NodeResources], *, tp: int, device: Device, pool_resources: bool = False
) -> tuple[WorkerPlan, ...]:
    """One plan for each worker. On CPU any number fits, each with its share; a rank on a GPU has one to itself.

    `device` auto means GPUs if there is one for every rank, else CPUs. Raises Misconfigured if requested GPUs are
    missing.
    """
    sizes = _sizes(pools, tp)
    num_ranks = sum(sizes)
    resolved = _device(device, nodes, sizes)
    cpus = sum(node.cpus for node in nodes) or 1.0
    share = max(0.0001, _share(cpus, num_ranks))
    largest = max((node.cpus for node in nodes), default=1.0)
    threads = max(1, int(min(largest, cpus / num_ranks)))
    return tuple(
        WorkerPlan(
            worker_id=f"{role}-{number}",
            role=role,
            device=resolved,
            num_ranks=pools.tp(role, tp),
            cpus_per_rank=share,
            gpus_per_rank=1 if resolved == "cuda" else 0,
            num_threads=threads,
            pool_resource=str(role) if pool_resources else "",
        )
        for role, count in pools.counts().items()
        for number in range(count)
    )


def replan(
    kept: Sequence[WorkerPlan],
    pools: PoolsConfig,
    nodes: Sequence[NodeResources],
    *,
    tp: int,
    pool_resources: bool = False,
) -> tuple[WorkerPlan, ...]:
    """Like `plan`, for workers beside those of `kept`, which keep their plans. New workers use the same device; they
    share the CPUs that are left, or reserve none."""
    planned = plan(pools, nodes, tp=tp, device=kept[0].device, pool_resources=pool_resources)
    known = {one.worker_id: one for one in kept}
    staying = [known[one.worker_id] for one in planned if one.worker_id in known]
    num_added_ranks = sum(one.num_ranks for one in planned if one.worker_id not in known)
    free = sum(node.cpus for node in nodes) - sum(one.cpus_per_rank * one.num_ranks for one in staying)
    share = _share(free, num_added_ranks)
    return tuple(known.get(one.worker_id) or replace(one, cpus_per_rank=share) for one in planned)


def _share(cpus: float, num_ranks: int) -> float:
    """Rounded down: Ray counts in ten-thousandths, and the shares must not add up to more than there is."""
    return math.floor(max(0.0, min(MAX_CPUS_PER_RANK, cpus / max(1, num_ranks))) * 10_000) / 10_000


def why_not_gpus(pools: PoolsConfig, nodes: Sequence[NodeResources], *, tp: int) -> str:
    """The GPUs that are missing for every rank to have its own; "" if none."""
    sizes = _sizes(pools, tp)
    if (num_placed := _num_placed(sizes, nodes)) == len(sizes):
        return ""
    gpus, counts = sum(int(node.gpus) for node in nodes), pools.counts()
    same = len(set(sizes)) == 1
    workers = ", ".join(
        f"{count} {role}" + ("" if same else f" with tp {pools.tp(role, tp)}")
        for role, count in counts.items()
        if count
    )
    spread = f", but on one machine each for {num_placed} of them only" if gpus >= sum(sizes) else ""
    return f"{workers}{f' with tp {sizes[0]}' if same else ''} need {sum(sizes)} GPUs, and there are {gpus}{spread}"


def _sizes(pools: PoolsConfig, tp: int) -> list[int]:
    """The ranks of each worker."""
    return [pools.tp(role, tp) for role, count in pools.counts().items() for _ in range(count)]


def _num_placed(sizes: Sequence[int], nodes: Sequence[NodeResources]) -> int:
    """How many workers find a machine with a GPU for every rank: largest worker first, on the machine with the most
    free GPUs."""
    left = sorted(int(node.gpus) for node in nodes)
    for number, size in enumerate(sorted(sizes, reverse=True)):
        if not left or left[-1] < size:
            return number
        left[-1] -= size
        left.sort()
    return len(sizes)


def _device(device: Device, nodes: Sequence[NodeResources], sizes: Sequence[int]) -> Literal["cpu", "cuda"]:
    if device != "auto":
        return device
    return "cuda" if _num_placed(sizes, nodes) == len(sizes) else "cpu"


def check_fits(pools: PoolsConfig, nodes: Sequence[NodeResources], *, tp: int, device: Device) -> None:
    """Raises Misconfigured if GPUs are requested that these nodes, whose number is fixed, do not have."""
    if device == "cuda" and (missing := why_not_gpus(pools, nodes, tp=tp)):
        smaller = "" if pools.colocated else f"--colocated (1 worker, {counted(tp, 'GPU')}) or "
        raise Misconfigured(f"{missing}: use {smaller}--device cpu", param="device")
