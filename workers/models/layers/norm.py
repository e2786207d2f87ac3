"""RMS norm (https://arxiv.org/abs/1910.07467) and layer norm, alone or with the residual stream added first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.models.families.traits import NormKind
from workers.weights.encoding import LayerContext
from workers.weights.slots import Slot


def norm_of(context: LayerContext, name: str, size: int, kind: NormKind) -> RMSNorm | LayerNorm:
    if kind.centred:
        return LayerNorm(context, name, size, kind)
    return RMSNorm(context, name, size, kind.eps, offset=kind.offset, wide=kind.wide)


class RMSNorm:
    """Over the last dimension, which has `size` entries. Every rank holds the whole weight.

    `offset` is added to the stored weight. `wide`: the weight is kept in float32, and the product with it rounded once.
    `order`: each run of so many entries is taken in this order (`head_order`).
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        wide: bool = False,
        order: tuple[int, ...] = (),
    ) -> None:
        self._name = name
        self._kernels = context.kernels
        self._eps = eps
        self._offset = offset
        self._order = order
        self.weight = context.empty(size, dtype=torch.float32 if wide else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.add_rms_norm(x_TE, residual_TE, self.weight, self._eps)

    def slots(self) -> Iterator[Slot]:
        yield weight_slot(self._name, self.weight, offset=self._offset, order=self._order)


class LayerNorm:
    """Over the last dimension, in float32; weight and bias are kept in float32."""

    def __init__(self, context: LayerContext, name: str, size: int, kind: NormKind) -> None:
        self._name = name
        self._kernels = context.kernels
        self._eps = kind.eps
        self.weight = context.empty(size, dtype=torch.float32)
        self.bias = context.empty(size, dtype=torch.float32) if kind.bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.layer_norm(x, self.weight, self.bias, self._eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream_TE = x_TE + residual_TE
        return self(stream_TE), stream_TE

    def slots(self) -> Iterator[Slot]:
        yield weight_slot(self._name, self.weight)
        if self.bias is not None:
            yield Slot(name=f"{self._name}.bias", shape=tuple(self.bias.shape), target=self.bias)


class AllHeadsNorm:
    """RMS norm over the heads of all ranks together: the ranks add up their squares. x is [T, heads, D]."""

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        total: int,
        share: range,
        kind: NormKind,
        copies: int,
        order: tuple[int, ...] = (),
    ) -> None:
        """This rank has `share` of `total` entries, each of which is on `copies` ranks."""
        self._name, self._kernels, self._parallel, self._eps = name, context.kernels, context.parallel, kind.eps
        self._total, self._start, self._copies, self._order = total, share.start, copies, order
        self.weight = context.empty(len(share), dtype=torch.float32 if kind.wide else None)

    def __call__(self, x_THD: torch.Tensor) -> torch.Tensor:
        if self._parallel.size == 1:
            together = x_THD.view(x_THD.shape[0], 1, self._total)
            return self._kernels.rms_norm(together, self.weight, self._eps).view(x_THD.shape)
        wide_TI = x_THD.flatten(1).float()
        sums_T1 = self._parallel.all_reduce(wide_TI.square().sum(-1, keepdim=True))
        normed_TI = wide_TI * torch.rsqrt(sums_T1 / (self._total * self._copies) + self._eps)
        return (normed_TI.to(self.weight.dtype) * self.weight).to(x_THD.dtype).view(x_THD.shape)

    def slots(self) -> Iterator[Slot]:
        yield Slot(
            name=f"{self._name}.weight", shape=(self._total,), target=self.weight, start=self._start, order=self._order
        )


def weight_slot(name: str, weight: torch.Tensor, *, offset: float = 0.0, order: tuple[int, ...] = ()) -> Slot:
    def add_offset(stored: torch.Tensor) -> None:
        weight.copy_(stored.float() + offset)

    return Slot(
        name=f"{name}.weight",
        shape=tuple(weight.shape),
        target=weight,
        order=order,
        consume=add_offset if offset else None,
    )
