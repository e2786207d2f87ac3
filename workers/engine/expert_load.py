"""How evenly tokens choose their experts, as one figure: a series for each expert of each layer would be thousands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CALLS = 256


class ExpertLoad:
    """Over `counts`, one [experts] int64 for each sparse layer, of tokens since the start. Looks at them at the first
    call and at one in 256: it is called after every step."""

    def __init__(self, counts: Sequence[torch.Tensor]) -> None:
        self._counts = tuple(counts)
        self._calls = 0
        self._imbalance = 0.0

    def __call__(self) -> float:
        """Tokens of the most popular expert over the mean of its layer, in the layer where that is highest; 0 before
        any token was counted."""
        if self._calls % _CALLS == 0:
            self._imbalance = max(map(_imbalance, self._counts), default=0.0)
        self._calls += 1
        return self._imbalance


def _imbalance(counts_X: torch.Tensor) -> float:
    total = int(counts_X.sum())
    return int(counts_X.max()) * len(counts_X) / total if total else 0.0
