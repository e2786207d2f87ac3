"""Linear layers cut over the ranks: by output columns, by input rows, and several checkpoint tensors fused into one.

Legend: T tokens, I and O the full input and output sizes; a rank holds its share of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.kernels.cpu.layers import TiledProduct
from workers.models.layers.matrix import Matrix
from workers.models.layers.slots import Place, Slot

OVERLAPPED_TOKENS = 1024
"""From so many tokens on, partial sums are added up in two halves: below, a product is too short to hide anything
behind, and half of it would be slower. Chosen by reasoning, not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Checkpoint tensor `name` [O, I]; this rank computes outputs [start, start + size) of `total`."""

    name: str
    total: int
    start: int
    size: int


class ColumnParallel:
    """y = x W^T + b with the outputs cut over the ranks. Several projections of the same input stand side by side."""

    def __init__(
        self,
        place: Place,
        parts: Sequence[Columns],
        num_inputs: int,
        *,
        bias: bool,
        matrix: Callable[[torch.Tensor], Matrix] = Matrix,
    ) -> None:
        self._parts = tuple(parts)
        self._num_inputs = num_inputs
        num_outputs = sum(part.size for part in parts)
        self.sizes = [part.size for part in parts]
        self._weight = matrix(place.empty(num_outputs, num_inputs))
        self.bias_O = place.empty(num_outputs) if bias else None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self._weight(x_TI, self.bias_O)

    def tiled(self) -> TiledProduct | None:
        """All that a call does, if it is one product on tiles."""
        weight = self._weight.tiled
        return None if weight is None else TiledProduct(weight=weight, bias=weight.packed_bias(self.bias_O))

    def pack(self) -> None:
        self._weight.pack()

    def slots(self) -> Iterator[Slot]:
        weights = torch.split(self._weight.weight_OI, self.sizes)
        for part, target in zip(self._parts, weights, strict=True):
            shape = (part.total, self._num_inputs)
            yield Slot(name=f"{part.name}.weight", shape=shape, target=target, start=part.start)
        if self.bias_O is not None:
            for part, target in zip(self._parts, torch.split(self.bias_O, self.sizes), strict=True):
                yield Slot(name=f"{part.name}.bias", shape=(part.total,), target=target, start=part.start)


class RowParallel:
    """y = x W^T + b where each rank holds its share of the inputs; the ranks' partial sums are added up."""

    def __init__(self, place: Place, name: str, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        self._name = name
        self._parallel = place.parallel
        self._shape = (num_outputs, num_inputs)
        share = num_inputs // place.parallel.size
        self._start = place.parallel.rank * share
        self._weight = Matrix(place.empty(num_outputs, share))
        self.bias_O = place.empty(num_outputs) if bias else None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = self._summed(x_TI)
        return y_TO if self.bias_O is None else y_TO + self.bias_O

    def _summed(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Of a long step in two halves: the ranks add up the first while each multiplies the second."""
        num_tokens = x_TI.shape[0]
        if self._parallel.size == 1 or num_tokens < OVERLAPPED_TOKENS:
            return self._parallel.all_reduce(self._weight(x_TI))
        halves, sums = [], []
        for part_TI in x_TI.tensor_split(2):
            halves.append(self._weight(part_TI))
            sums.append(self._parallel.begin_all_reduce(halves[-1]))
        for wait in sums:
            wait()
        return torch.cat(halves)

    def tiled(self) -> TiledProduct | None:
        """All that a call does, if it is one product on tiles: on one rank, without a bias."""
        alone = self._parallel.size == 1 and self.bias_O is None
        return TiledProduct(weight=self._weight.tiled) if alone and self._weight.tiled is not None else None

    def pack(self) -> None:
        self._weight.pack()

    def slots(self) -> Iterator[Slot]:
        target = self._weight.weight_OI
        yield Slot(name=f"{self._name}.weight", shape=self._shape, target=target, dim=1, start=self._start)
        if self.bias_O is not None:
            yield Slot(name=f"{self._name}.bias", shape=self._shape[:1], target=self.bias_O)
