"""Plans which worker gets which share of the machines. Pure; Ray then reserves the shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.config.cluster_config import PoolsConfig
from protos.errors import Misconfigured
from protos.hints import counted
from protos.values import WorkerRole
from router.fleet_owner import Revision
from workers.worker_config import Device

MAX_CPUS_PER_RANK = 1.0  # what Ray reserves; a rank's threads decide how many cores it uses
MAX_RANKS_PER_CPU = 4  # among workers that are added while others serve
FIRST = Revision()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """The resources of one machine of a Ray cluster."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: `num_ranks` processes, each with these shares of its node and `num_threads` torch threads. All are on
    one node, or with `spans_nodes` on several where none has room for all.

    `pool_resource` names a custom Ray resource of which each rank takes one. `revision`: the model and settings with
    which it starts.
    """

    worker_id: str
    role: WorkerRole
    device: Literal["cpu", "cuda"]
    num_ranks: int
    cpus_per_rank: float
    gpus_per_rank: int
    num_threads: int
    pool_resource: str = ""
    spans_nodes: bool = False
    revision: Revision = field(default_factory=Revision)

    def bundles(self) -> list[dict[str, float]]:
        """The resources of each rank's bundle in the placement group, in rank order."""
        bundle = {"CPU": self.cpus_per_rank} if self.cpus_per_rank else {}
        if self.gpus_per_rank:
            bundle["GPU"] = float(self.gpus_per_rank)
        if self.pool_resource:
            bundle[self.pool_resource] = 1.0
        if not bundle:
            bundle["memory"] = 1.0  # Ray refuses an empty one; a node type for Ray's autoscaler need not declare memory
        return [dict(bundle) for _ in range(self.num_ranks)]


def plan(
    pools: PoolsConfig,
    nodes: Sequence[NodeResources],
    *,
    tp: int,
    device: Device,
    pool_resources: bool = False,
    span_nodes: bool = False,
    fleet: str = "",
    revision: Revision = FIRST,
) -> tuple[WorkerPlan, ...]:
    """One plan for each worker, whose name begins with that of the `fleet`. On CPU any number fits, each with its
    share; a rank on a GPU has one to itself.

    `device` auto means GPUs if there is one for every rank, else CPUs. Raises Misconfigured if requested GPUs are
    missing.
    """
    sizes = _sizes(pools, tp)
    num_ranks = max(1, sum(sizes))
    resolved = _device(device, joined(nodes) if span_nodes else nodes, sizes)
    cpus = sum(node.cpus for node in nodes) or 1.0
    share = max(0.0001, _share(cpus, num_ranks))
    largest = max((node.cpus for node in nodes), default=1.0)
    threads = max(1, int(min(largest, cpus / num_ranks)))
    return tuple(
        WorkerPlan(
            worker_id=f"{_names(fleet, role)}-{number}",
            role=role,
            device=resolved,
            num_ranks=pools.tp(role, tp),
            cpus_per_rank=share,
            gpus_per_rank=1 if resolved == "cuda" else 0,
            num_threads=threads,
            pool_resource=str(role) if pool_resources else "",
            spans_nodes=span_nodes,
            revision=revision,
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
    device: Device | None = None,
    pool_resources: bool = False,
    span_nodes: bool = False,
    flips: Mapping[str, WorkerRole] | None = None,
    fleet: str = "",
    revision: Revision = FIRST,
    others: Mapping[WorkerRole, int] | None = None,
) -> tuple[WorkerPlan, ...]:
    """Like `plan`, for workers beside `kept` ones, which keep their plans; those in `flips` change roles. Of a pool
    that shrinks, the workers that came from the other pool are dropped first, then those with the highest numbers. New
    workers have unused names, use the same device (`device` where none is kept), and share the CPUs that are left, or
    reserve none. The pools consist of workers with this `revision`; `others` says how many of other revisions stay, by
    role. Raises Misconfigured for a flip between pools of different tensor parallelism."""
    device = kept[0].device if kept else device or "auto"
    planned = plan(
        pools, nodes, tp=tp, device=device, pool_resources=pool_resources, span_nodes=span_nodes, fleet=fleet,
        revision=revision,
    )  # fmt: skip
    templates = {one.role: one for one in planned}
    known = [_flipped(one, (flips or {}).get(one.worker_id, one.role), pools, tp) for one in kept]
    staying = [
        one for role, count in (others or {}).items() for one in _first(known, role, count, lambda it: it != revision)
    ]
    added: list[WorkerPlan] = []
    for role, count in pools.counts().items():
        pool = _first(known, role, count, lambda it: it == revision)
        staying += pool
        names = _unused_names(_names(fleet, role), {one.worker_id for one in kept})
        added += [replace(templates[role], worker_id=next(names)) for _ in range(count - len(pool))]
    free = sum(node.cpus for node in nodes) - sum(one.cpus_per_rank * one.num_ranks for one in staying)
    share = _share(free, sum(one.num_ranks for one in added))
    return tuple(sorted((*staying, *(replace(one, cpus_per_rank=share) for one in added)), key=_order))


def _first(
    plans: Sequence[WorkerPlan], role: WorkerRole, count: int, has: Callable[[Revision], bool]
) -> list[WorkerPlan]:
    """The workers of a pool that are kept longest, of those with the right revision."""
    return sorted((one for one in plans if one.role is role and has(one.revision)), key=_seniority)[:count]


def _flipped(plan: WorkerPlan, role: WorkerRole, pools: PoolsConfig, tp: int) -> WorkerPlan:
    """The plan with another role. It keeps its place, and with it the custom resource of its first pool."""
    if role is not plan.role and pools.tp(role, tp) != plan.num_ranks:
        raise Misconfigured(
            f"{plan.worker_id} has {counted(plan.num_ranks, 'rank')}, and a {role} worker has {pools.tp(role, tp)}: "
            "only workers of pools with the same tensor parallelism change their roles; scale both pools instead",
            param="role",
        )
    return replace(plan, role=role)


def _seniority(plan: WorkerPlan) -> tuple[bool, int]:
    name, number = _name_parts(plan)
    return name != plan.role, number


def _order(plan: WorkerPlan) -> tuple[int, str, int]:
    return (list(WorkerRole).index(plan.role), *_name_parts(plan))


def _name_parts(plan: WorkerPlan) -> tuple[str, int]:
    name, _, number = plan.worker_id.rpartition("-")
    return (name.rpartition("-")[2], int(number)) if number.isdigit() else (plan.worker_id, 0)


def _names(fleet: str, role: WorkerRole) -> str:
    return f"{fleet}-{role}" if fleet else str(role)


def _unused_names(beginning: str, used: Container[str]) -> Iterator[str]:
    return (name for name in (f"{beginning}-{number}" for number in itertools.count()) if name not in used)


def missing(desired: Mapping[str, WorkerRole], serving: Mapping[str, WorkerRole]) -> list[str]:
    """A phrase for each difference between the serving workers and the desired ones."""
    return [
        *(f"{worker_id} to serve" for worker_id in desired if worker_id not in serving),
        *(
            f"{worker_id} to change from {serving[worker_id]} to {role}"
            for worker_id, role in desired.items()
            if serving.get(worker_id, role) is not role
        ),
        *(f"{worker_id} to end" for worker_id in serving if worker_id not in desired),
    ]


def _share(cpus: float, num_ranks: int) -> float:
    """Rounded down: Ray counts in ten-thousandths, and the shares must not add up to more than there is."""
    return math.floor(max(0.0, min(MAX_CPUS_PER_RANK, cpus / max(1, num_ranks))) * 10_000) / 10_000


def why_not_gpus(pools: PoolsConfig, nodes: Sequence[NodeResources], *, tp: int) -> str:
    """Describes the GPUs that are missing for each rank to have its own; "" if none are."""
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


def shared_cpus(plans: Sequence[WorkerPlan], nodes: Sequence[NodeResources]) -> str:
    """A warning about ranks with less than a CPU each, and what to give instead; "" if there are enough."""
    num_ranks, cpus = sum(one.num_ranks for one in plans), sum(node.cpus for node in nodes)
    most = max(1, int(cpus))
    if num_ranks <= most or plans[0].device != "cpu":
        return ""
    workers = counted(len(plans), "worker")
    if num_ranks > len(plans):
        workers, fix = f"{workers} of together {counted(num_ranks, 'rank')}", "fewer workers, or a smaller --tp"
    elif most == 1 or plans[0].role is WorkerRole.COLOCATED:
        fix = f"at most --workers {most}"
    else:
        fix = f"at most {most} workers, as --prefill 1 --decode {most - 1}"
    return (
        f"{workers} share {counted(most, 'CPU')}: they start and answer slowly, and may time out; give {fix}, or more "
        "machines (--ray-address)"
    )


def joined(nodes: Sequence[NodeResources]) -> Sequence[NodeResources]:
    """The nodes as one, for workers whose ranks may be on several."""
    return (NodeResources(cpus=sum(node.cpus for node in nodes), gpus=sum(node.gpus for node in nodes)),)


def _sizes(pools: PoolsConfig, tp: int) -> list[int]:
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


def check_cores(pools: PoolsConfig, nodes: Sequence[NodeResources], *, tp: int) -> None:
    """Raises Misconfigured if ranks on CPUs would share cores among more than `MAX_RANKS_PER_CPU`."""
    num_ranks, cpus = sum(_sizes(pools, tp)), sum(node.cpus for node in nodes)
    if num_ranks > (most := int(MAX_RANKS_PER_CPU * max(1.0, cpus))):
        raise Misconfigured(
            f"{counted(num_ranks, 'rank')} on {cpus:g} CPUs: give at most {most}, {MAX_RANKS_PER_CPU} to a CPU; with "
            "more none of them gets ahead",
            param="counts",
        )


def check_fits(pools: PoolsConfig, nodes: Sequence[NodeResources], *, tp: int, device: Device) -> None:
    """Raises Misconfigured if GPUs are requested that these nodes, whose number is fixed, do not have."""
    if device == "cuda" and (missing := why_not_gpus(pools, nodes, tp=tp)):
        smaller = "" if pools.colocated else f"--colocated (1 worker, {counted(tp, 'GPU')}) or "
        raise Misconfigured(f"{missing}: use {smaller}--device cpu", param="device")
