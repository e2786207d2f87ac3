"""RMS norm (https://arxiv.org/abs/1910.07467), alone or with the residual stream added first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.checkpoint.encoding import LayerContext
from workers.checkpoint.slots import Slot


class RMSNorm:
    """Over the last dimension, which has `size` entries. Every rank holds the whole weight."""

    def __init__(self, context: LayerContext, name: str, size: int, eps: float) -> None:
        self._name = name
        self._kernels = context.kernels
        self._eps = eps
        self.weight = context.empty(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed sum, sum)."""
        return self._kernels.add_rms_norm(x_TE, residual_TE, self.weight, self._eps)

    def slots(self) -> Iterator[Slot]:
        yield Slot(name=f"{self._name}.weight", shape=tuple(self.weight.shape), target=self.weight)
