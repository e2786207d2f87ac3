"""Where each tensor of a checkpoint goes. The layers list their slots; the loader checks all before it reads one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """`target` takes its length of dimension `dim` of the tensor `name`, from index `start` on.

    `shape` is the whole tensor's in the checkpoint, `dtypes` are those it may be stored as, by safetensors' names.
    """

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    dim: int = 0
    start: int = 0
    dtypes: frozenset[str] = FLOATS

    @property
    def part(self) -> slice:
        return slice(self.start, self.start + self.target.shape[self.dim])


class Loadable(Protocol):
    """A part of a model that is filled from a checkpoint. The names of its slots begin with the part's own name."""

    def slots(self) -> Iterator[Slot]: ...
