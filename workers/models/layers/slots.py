"""Where each tensor of a checkpoint goes. Layers say it, the loader checks all of it and only then reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.kernels.base import Kernels
from workers.parallel.group import TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Tensor `name`, of `shape` in the checkpoint, from index `start` of dimension `dim` on, fills `target`."""

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    dim: int = 0
    start: int = 0


class Layer(Protocol):
    """What holds weights. The names of its slots begin with the prefix it was made with."""

    def slots(self) -> Iterator[Slot]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer's weights live and what it computes with: given to every layer of a model alike."""

    device: str
    dtype: torch.dtype
    parallel: TensorParallel
    kernels: Kernels

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
