"""Queries that grow with their position, so that attention over long contexts stays as sharp (`QueryGrowth`)."""

from __future__ import annotations

import torch

from workers.attention.backend import AttentionInputs
from workers.models.families.traits import QueryGrowth


class StepGrowth:
    """The growth of queries with their position, for all layers of a model. `factors_T`, float32, are those of the
    current step's tokens, or None if all are 1."""

    def __init__(self, by: QueryGrowth) -> None:
        self._by = by
        self.factors_T: torch.Tensor | None = None

    def begin(self, inputs: AttentionInputs) -> None:
        """On a GPU factors are always computed: a recorded graph replays the same operations for every context."""
        by, positions_T = self._by, inputs.positions_T
        if positions_T.device.type == "cpu" and inputs.max_context <= by.length:
            self.factors_T = None
        else:
            self.factors_T = 1 + by.beta * torch.log1p((positions_T // by.length).float())

    def __call__(self, q_TND: torch.Tensor) -> torch.Tensor:
        if self.factors_T is None:
            return q_TND
        return (q_TND.float() * self.factors_T[:, None, None]).to(q_TND.dtype)
