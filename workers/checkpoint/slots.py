"""Where each tensor of a checkpoint goes. The layers list their slots; the loader checks all before it reads one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.checkpoint.source import FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """`target` takes its length of dimension `dim` of the tensor `name`, from index `start` on.

    `shape` is the whole tensor's in the checkpoint, `dtypes` are those it may be stored as, by safetensors' names.
    `check` raises BadCheckpoint or UnsupportedModel for values that cannot be served; it is given the file and
    tensor for the message, and the filled target, before any tensor without a check is read. `consume` takes the tensor
    that is read in place of the target, which has a shape and no memory.
    """

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    dim: int = 0
    start: int = 0
    dtypes: frozenset[str] = FLOATS
    check: Callable[[str, torch.Tensor], None] | None = None
    consume: Callable[[torch.Tensor], None] | None = None

    @property
    def part(self) -> slice:
        if not self.shape:
            return slice(None)
        return slice(self.start, self.start + self.target.shape[self.dim])


class Loadable(Protocol):
    """A part of a model that is filled from a checkpoint. The names of its slots begin with the part's own name."""

    def slots(self) -> Iterator[Slot]: ...
