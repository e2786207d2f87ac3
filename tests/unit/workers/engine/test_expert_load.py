from __future__ import annotations

import torch

from workers.engine.expert_load import ExpertLoad


def test_the_figure_is_that_of_the_worst_layer_and_follows_the_counts() -> None:
    counts = [torch.zeros(4, dtype=torch.int64), torch.tensor([5, 5, 5, 5])]
    load = ExpertLoad(counts)
    assert load() == 1.0
    counts[0] += torch.tensor([6, 1, 1, 0])
    assert {load() for _ in range(300)} == {1.0, 3.0}
    assert ExpertLoad([])() == ExpertLoad([torch.zeros(3, dtype=torch.int64)])() == 0.0
