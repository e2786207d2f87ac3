"""Feed-forward blocks: down(activation(gate(x)) * up(x)), gate and up in one matrix product, and the one without a
gate.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.adapters.linear import AdaptableLinear
from workers.kernels.cpu.products import PackedProduct
from workers.models.layers.activation import gate
from workers.models.layers.linear_layers import ColumnParallel, RowParallel, projections_of
from workers.models.model_config import ModelConfig
from workers.weights.encoding import LayerContext
from workers.weights.slots import Slot


class GatedMLP:
    """A gate of SiLU is part of the product, where the weight's encoding has such a one."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> None:
        total, names = config.intermediate_size, config.spec.tensors
        self._kernels = context.kernels
        self._activation = config.activation
        self._gate_up = ColumnParallel(
            context,
            projections_of(prefix, names.gate_up, (total, total), (_share(context, total),) * 2, ((), ())),
            config.hidden_size,
            bias=config.mlp_bias,
            gated=config.activation == "silu",
        )
        self._down = RowParallel(context, f"{prefix}.{names.down}", total, config.hidden_size, bias=config.mlp_bias)

    @property
    def waits(self) -> bool:
        return False

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        inner_TF = self._gate_up(x_TE)
        if self._activation != "silu":
            inner_TF = gate(self._activation, self._kernels, inner_TF)
        return self._down(inner_TF)

    def packed_products(self) -> tuple[PackedProduct, PackedProduct] | None:
        """The products of gate and up, and of down."""
        gate_up, down = self._gate_up.packed_product(), self._down.packed_product()
        return None if gate_up is None or down is None else (gate_up, down)

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._gate_up, self._down)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> None:
        total, names = config.intermediate_size, config.spec.tensors
        self._kernels, self._activation = context.kernels, config.activation
        self._up = ColumnParallel(
            context,
            projections_of(prefix, names.gate_up, (total,), (_share(context, total),), ((),)),
            config.hidden_size,
            bias=config.mlp_bias,
        )
        self._down = RowParallel(context, f"{prefix}.{names.down}", total, config.hidden_size, bias=config.mlp_bias)

    @property
    def waits(self) -> bool:
        return False

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._down(self._kernels.activate(self._up(x_TE), self._activation))

    def packed_products(self) -> tuple[PackedProduct, PackedProduct] | None:
        """The products of up and of down."""
        up, down = self._up.packed_product(), self._down.packed_product()
        return None if up is None or down is None else (up, down)

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._up, self._down)

    def pack(self) -> None:
        self._up.pack()
        self._down.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._up.slots()
        yield from self._down.slots()


def _share(context: LayerContext, total: int) -> range:
    size = total // context.parallel.size
    return range(context.parallel.rank * size, (context.parallel.rank + 1) * size)
