"""Linear layers cut over the ranks: by output columns, by input rows, and several checkpoint tensors fused into one.

Legend: T tokens, I and O the full input and output sizes; a rank holds its share of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workers.adapters.low_rank import LinearAdapters
from workers.kernels.cpu.products import PackedProduct
from workers.parallel.group import TensorParallel
from workers.weights.encoding import LayerContext, Matrix, Projection, WeightShare
from workers.weights.slots import Slot

OVERLAPPED_TOKENS = 1024
"""From so many tokens on, partial sums are added up in two halves: below, a product is too short to hide anything
behind, and half of it would be slower. Chosen by reasoning, not measured yet."""


def projections_of(
    prefix: str, names: Sequence[str], totals: Sequence[int], shares: Sequence[range], orders: Sequence[tuple[int, ...]]
) -> list[Projection]:
    """One projection for each of `totals` outputs, of which this rank has `shares`. A single name stands for a tensor
    with all projections."""
    fused = len(names) == 1 < len(totals)
    slices, before = [], 0
    for place, (total, share, order) in enumerate(zip(totals, shares, orders, strict=True)):
        slices.append(
            Projection(
                name=f"{prefix}.{names[0 if fused else place]}",
                total=sum(totals) if fused else total,
                start=share.start + (before if fused else 0),
                size=len(share),
                order=order,
            )
        )
        before += total
    return slices


class ColumnParallel:
    """y = x W^T + b with the outputs cut over the ranks. Several projections of the same input stand side by side."""

    def __init__(
        self,
        context: LayerContext,
        projections: Sequence[Projection],
        num_inputs: int,
        *,
        bias: bool,
        gated: bool = False,
    ) -> None:
        self._projections = tuple(projections)
        self.sizes = [projection.size for projection in projections]
        self.share = WeightShare(
            projections=self._projections, total_inputs=num_inputs, first_input=0, num_inputs=num_inputs
        )
        self._weight = context.matrix(self.share, gated=gated)
        self._silu_mul = context.kernels.silu_mul if gated else None
        self.bias_O = context.empty(self.share.num_outputs) if bias else None
        self.adapters: LinearAdapters | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.adapters is None:
            return self._weight(x_TI, self.bias_O)
        if self._silu_mul is not None:
            return self.adapters.gated(x_TI, self._weight, self.bias_O, self._silu_mul)
        return self.adapters.product(x_TI, self._weight, self.bias_O)

    @property
    def matrix(self) -> Matrix:
        return self._weight

    def packed_product(self) -> PackedProduct | None:
        """The product of a call; None if compiled layers cannot compute it."""
        weight = self._weight.packed_weight
        return None if weight is None else PackedProduct(weight=weight, bias_O=self.bias_O)

    def pack(self) -> None:
        self._weight.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._weight.slots()
        if self.bias_O is not None:
            for part, target in zip(self._projections, torch.split(self.bias_O, self.sizes), strict=True):
                yield Slot(
                    name=f"{part.name}.bias", shape=(part.total,), target=target, start=part.start, order=part.order
                )


class RowParallel:
    """y = x W^T + b, where each rank has a share of the inputs. Partial sums are added up; the first rank adds the
    bias."""

    def __init__(self, context: LayerContext, name: str, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        self._name = name
        self._parallel = context.parallel
        size = num_inputs // context.parallel.size
        whole = Projection(name=name, total=num_outputs, start=0, size=num_outputs)
        self.share = WeightShare(
            projections=(whole,), total_inputs=num_inputs, first_input=context.parallel.rank * size, num_inputs=size
        )
        self._weight = context.matrix(self.share)
        self.bias_O = context.empty(num_outputs) if bias else None
        self.adapters: LinearAdapters | None = None

    @property
    def _added_bias_O(self) -> torch.Tensor | None:
        return self.bias_O if self._parallel.rank == 0 else None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._parallel.size == 1:
            if self.adapters is None:
                return self._weight(x_TI, self.bias_O)
            return self.adapters.product(x_TI, self._weight, self.bias_O)
        return self._summed(x_TI)

    def _summed(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Computes a long step in two halves: the ranks add up the first while each multiplies the second."""
        if self.adapters is not None and self.adapters.here():
            return self._parallel.all_reduce(self.adapters.product(x_TI, self._weight, self._added_bias_O))
        if not sums_overlap(self._parallel, x_TI.shape[0]):
            return self._parallel.all_reduce(self._weight(x_TI, self._added_bias_O))
        halves, sums = [], []
        for part_TI in x_TI.tensor_split(2):
            halves.append(self._weight(part_TI, self._added_bias_O))
            sums.append(self._parallel.begin_all_reduce(halves[-1]))
        for wait in sums:
            wait()
        return torch.cat(halves)

    def packed_product(self) -> PackedProduct | None:
        """The product of a call without the sum over ranks; None if compiled layers cannot compute it."""
        weight = self._weight.packed_weight
        return None if weight is None else PackedProduct(weight=weight, bias_O=self._added_bias_O)

    def pack(self) -> None:
        self._weight.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._weight.slots()
        if self.bias_O is not None:
            yield Slot(name=f"{self._name}.bias", shape=tuple(self.bias_O.shape), target=self.bias_O)


def sums_overlap(parallel: TensorParallel, num_tokens: int) -> bool:
    """Whether a step is so long that its sums over ranks are made while the next products are computed."""
    return parallel.size > 1 and num_tokens >= OVERLAPPED_TOKENS
