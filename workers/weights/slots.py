"""Where each tensor of a checkpoint goes. The layers list their slots; the loader checks all before it reads one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.weights.source import FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """`target` takes its length of dimension `dim` of the tensor `name`, from index `start` on.

    `shape` is the whole tensor's in the checkpoint, `dtypes` are those it may be stored as, by safetensors' names.
    `check` raises BadCheckpoint or UnsupportedModel for values that cannot be served; it is given the file and
    tensor for the message, and the filled target, before any tensor without a check is read. `consume` takes the tensor
    that is read in place of the target, which may have a shape and no memory. Each run of `len(order)` rows of the part
    is taken in that order.
    """

    name: str
    shape: tuple[int, ...]
    target: torch.Tensor
    dim: int = 0
    start: int = 0
    dtypes: frozenset[str] = FLOATS
    check: Callable[[str, torch.Tensor], None] | None = None
    consume: Callable[[torch.Tensor], None] | None = None
    order: tuple[int, ...] = ()

    @property
    def part(self) -> slice:
        if not self.shape:
            return slice(None)
        return slice(self.start, self.start + self.target.shape[self.dim])


def in_order(rows: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Reorders each run of `len(order)` rows; unchanged without an order."""
    return rows[row_order(rows.shape[0], order, rows.device)] if order else rows


def row_order(count: int, order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [count]: the row for each place."""
    assert count % len(order) == 0, f"{count} rows are no runs of {len(order)}"
    starts = torch.arange(0, count, len(order), device=device).unsqueeze(1)
    return (starts + torch.tensor(order, device=device)).flatten()


class Loadable(Protocol):
    """A part of a model that is filled from a checkpoint. The names of its slots begin with the part's own name."""

    def slots(self) -> Iterator[Slot]: ...
