from __future__ import annotations

import torch

from workers.engine.expert_load import ExpertLoad


def test_the_figure_is_the_worst_layers() -> None:
    counts = [torch.zeros(4, dtype=torch.int64), torch.tensor([5, 5, 5, 5])]
    load = ExpertLoad(counts)
    assert load() == (1.0, 0.0, 0.0)
    counts[0] += torch.tensor([6, 1, 1, 0])
    assert {load().experts for _ in range(300)} == {1.0, 3.0}
    assert ExpertLoad([])() == ExpertLoad([torch.zeros(3, dtype=torch.int64)])() == (0.0, 0.0, 0.0)


def test_whole_experts_are_compared_with_a_placement_by_load() -> None:
    load = ExpertLoad([torch.tensor([5] * 6), torch.tensor([60, 10, 10, 10, 10, 10])], num_ranks=2)
    loads = load()
    assert loads.experts == 60 * 6 / 110
    assert loads.ranks == 80 * 2 / 110
    assert 1.0 <= loads.placed < 1.1
