"""Placement of replicated experts: what always holds, and no worse than the published algorithm on any loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import Misconfigured
from workers.parallel.expert_placement import place_experts


def published_imbalance(loads: list[float], num_slots: int, num_ranks: int) -> float:
    """EPLB's `replicate_experts` and `balanced_packing` for one layer, by their description."""
    counts = np.ones(len(loads))
    slots = list(range(len(loads)))
    for _ in range(num_slots - len(loads)):
        slots.append(int(np.argmax(np.array(loads) / counts)))
        counts[slots[-1]] += 1
    shares = np.array([loads[expert] / counts[expert] for expert in slots])
    sums, items = np.zeros(num_ranks), np.zeros(num_ranks)
    for slot in np.argsort(-shares, kind="stable"):
        free = [rank for rank in range(num_ranks) if items[rank] < num_slots // num_ranks]
        rank = min(free, key=lambda rank: sums[rank])
        sums[rank] += shares[slot]
        items[rank] += 1
    return float(sums.max() / sums.mean()) if sums.any() else 1.0


@given(
    loads=st.lists(st.integers(0, 10_000).map(float), min_size=1, max_size=24),
    num_ranks=st.sampled_from([1, 2, 3, 4, 8]),
    more=st.integers(0, 3),
)
@settings(max_examples=60)
def test_expert_placement_is_as_even_as_the_published_rule(loads: list[float], num_ranks: int, more: int) -> None:
    num_slots = (-(-len(loads) // num_ranks) + more) * num_ranks
    placed = place_experts(loads, num_slots=num_slots, num_ranks=num_ranks)
    assert [len(rank) for rank in placed.ranks] == [num_slots // num_ranks] * num_ranks
    everywhere = [expert for rank in placed.ranks for expert in rank]
    assert [everywhere.count(expert) for expert in range(len(loads))] == list(placed.num_replicas)
    assert min(placed.num_replicas) >= 1
    assert sum(placed.rank_loads) == pytest.approx(sum(loads))
    assert placed.imbalance <= published_imbalance(loads, num_slots, num_ranks) + 1e-9


def test_the_heaviest_experts_get_the_replicas() -> None:
    placed = place_experts([90, 132, 40, 61, 104, 165], num_slots=8, num_ranks=4)
    assert placed.num_replicas == (1, 2, 1, 1, 1, 2)
    assert placed.imbalance < 1.13


def test_groups_stay_on_their_node() -> None:
    loads = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    placed = place_experts(loads, num_slots=16, num_ranks=8, num_nodes=2, num_groups=4)
    nodes = [{expert // 3 for rank in placed.ranks[first : first + 4] for expert in rank} for first in (0, 4)]
    assert nodes[0].isdisjoint(nodes[1])
    assert len(nodes[0]) == len(nodes[1]) == 2


@pytest.mark.parametrize(
    ("num_slots", "num_ranks", "num_nodes", "named"),
    [(9, 2, 1, "num_slots is 9.*multiple of 2"), (8, 4, 3, "num_ranks is 4.*multiple of 3"), (4, 2, 1, "at least one")],
)
def test_numbers_that_do_not_fit_are_refused(num_slots: int, num_ranks: int, num_nodes: int, named: str) -> None:
    with pytest.raises(Misconfigured, match=named):
        place_experts([1.0] * 6, num_slots=num_slots, num_ranks=num_ranks, num_nodes=num_nodes)
