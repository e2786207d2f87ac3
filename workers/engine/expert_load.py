"""How evenly tokens choose their experts, in a few figures: series for each expert of each layer would be thousands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.parallel.expert_placement import ExpertImbalance, place_experts

_CALLS = 256
_PLACED_CALLS = 16 * _CALLS  # a placement of 256 experts takes tens of milliseconds


class ExpertLoad:
    """Computes imbalances from `counts`: tokens since the start, [experts] int64 for each sparse layer. It reads them
    at the first call and at one in 256. `num_ranks` divide the experts; 1: each has all."""

    def __init__(self, counts: Sequence[torch.Tensor], num_ranks: int = 1) -> None:
        self._counts = tuple(counts)
        self._num_ranks = num_ranks
        self._calls = 0
        self._found = ExpertImbalance()

    def __call__(self) -> ExpertImbalance:
        if self._calls % _CALLS == 0:
            self._look(places=self._calls % _PLACED_CALLS == 0)
        self._calls += 1
        return self._found

    def _look(self, *, places: bool) -> None:
        num, placed = self._num_ranks, self._found.placed
        experts, ranks, worst = max(map(_imbalance, self._counts), default=0.0), 0.0, None
        for counts_X in self._counts if num > 1 else ():
            by_rank = _imbalance(torch.stack([counts_X[rank::num].sum() for rank in range(num)]))
            if by_rank > ranks:
                ranks, worst = by_rank, counts_X
        if places and worst is not None:
            num_slots = (-(-len(worst) // num) + 1) * num
            placed = place_experts(worst.tolist(), num_slots=num_slots, num_ranks=num).imbalance
        self._found = ExpertImbalance(experts, ranks, placed)


def expert_load(counts: Sequence[torch.Tensor], num_ranks: int) -> ExpertLoad | None:
    """None for a model without experts."""
    return ExpertLoad(counts, num_ranks) if counts else None


def _imbalance(counts_X: torch.Tensor) -> float:
    total = int(counts_X.sum())
    return int(counts_X.max()) * len(counts_X) / total if total else 0.0
