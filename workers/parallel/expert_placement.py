"""Which expert goes to which rank, by their loads, where ranks have room for replicas. Pure.

The rule is that of EPLB (DeepSeek, github.com/deepseek-ai/EPLB): each further slot goes to the expert with the highest
load a replica, and replicas go, heaviest first, to the rank with the least load that has room. Groups of experts that a
router chooses together stay on one node. Exchanges of two replicas follow, while they lower the highest load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protos.errors import Misconfigured


class ExpertImbalance(NamedTuple):
    """Tokens of the busiest over the mean of its layer, in the layer where that is highest; 0 before any was counted.
    `ranks` and `placed` are of ranks that have whole experts, else 0: as experts are now, and as they would be if each
    rank had a slot more, for a replica, and experts were placed by their loads."""

    experts: float = 0.0
    ranks: float = 0.0
    placed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """`ranks`: the experts in each rank's slots; an expert is listed once for each replica."""

    ranks: tuple[tuple[int, ...], ...]
    num_replicas: tuple[int, ...]  # of each expert
    rank_loads: tuple[float, ...]  # if an expert's load is divided evenly over its replicas

    @property
    def imbalance(self) -> float:
        """The highest load of a rank over the mean; 1 is even."""
        mean = sum(self.rank_loads) / len(self.rank_loads)
        return max(self.rank_loads) / mean if mean else 1.0


def place_experts(
    loads: Sequence[float], *, num_slots: int, num_ranks: int, num_nodes: int = 1, num_groups: int = 1
) -> ExpertPlacement:
    """Places experts with these loads, in tokens, into `num_slots` slots, as many on each rank.

    If the nodes divide the groups, each node has equally many; otherwise groups are ignored. Raises Misconfigured for
    numbers that do not divide one another, or fewer slots than experts."""
    num_experts = len(loads)
    for name, value, by in (("num_slots", num_slots, num_ranks), ("num_ranks", num_ranks, num_nodes)):
        if by < 1 or value < 1 or value % by:
            raise Misconfigured(f"{name} is {value}: it must be a multiple of {by}", param=name)
    if num_slots < num_experts or num_experts < 1:
        raise Misconfigured(f"num_slots is {num_slots}: it must be at least one for each expert: {num_experts}")
    if num_groups % num_nodes or num_experts % num_groups:
        num_nodes = num_groups = 1
    size = num_experts // num_groups
    of_groups = [sum(loads[group * size : (group + 1) * size]) for group in range(num_groups)]
    ranks: list[tuple[int, ...]] = []
    replicas = [0] * num_experts
    for groups in _packed(of_groups, num_nodes):
        experts = [expert for group in sorted(groups) for expert in range(group * size, (group + 1) * size)]
        counts = _replicated([loads[expert] for expert in experts], num_slots // num_nodes)
        for expert, count in zip(experts, counts, strict=True):
            replicas[expert] = count
        slots = [expert for expert, count in zip(experts, counts, strict=True) for _ in range(count)]
        shares = [loads[expert] / replicas[expert] for expert in slots]
        packs = _evened(_packed(shares, num_ranks // num_nodes), shares)
        ranks += [tuple(sorted(slots[item] for item in pack)) for pack in packs]
    return ExpertPlacement(
        ranks=tuple(ranks),
        num_replicas=tuple(replicas),
        rank_loads=tuple(sum(loads[expert] / replicas[expert] for expert in rank) for rank in ranks),
    )


def _replicated(loads: Sequence[float], num_slots: int) -> list[int]:
    """Returns the number of slots of each expert, at least one."""
    counts = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        heaviest = max(range(len(loads)), key=lambda expert: (loads[expert] / counts[expert], -expert))
        counts[heaviest] += 1
    return counts


def _packed(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    room = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    sums = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        pack = min((pack for pack in range(num_packs) if len(packs[pack]) < room), key=lambda pack: (sums[pack], pack))
        packs[pack].append(item)
        sums[pack] += weights[item]
    return packs


def _evened(packs: list[list[int]], weights: Sequence[float]) -> list[list[int]]:
    """Exchanges an item of the heaviest pack with a lighter item of another pack, while both packs stay below its
    load."""
    sums = [sum(weights[item] for item in pack) for pack in packs]
    for _ in range(4 * len(weights)):
        heavy = max(range(len(packs)), key=lambda pack: sums[pack])
        best = None
        for light in range(len(packs)):
            for mine, each in enumerate(packs[heavy]):
                for theirs, other in enumerate(packs[light]):
                    moved = weights[each] - weights[other]
                    highest = max(sums[heavy] - moved, sums[light] + moved)
                    if moved > 0 and highest < sums[heavy] * (1 - 1e-9) and (best is None or highest < best[0]):
                        best = highest, light, mine, theirs, moved
        if best is None:
            break
        _, light, mine, theirs, moved = best
        packs[heavy][mine], packs[light][theirs] = packs[light][theirs], packs[heavy][mine]
        sums[heavy] -= moved
        sums[light] += moved
    return packs
