"""The feed-forward half of a layer: down(activation(gate(x)) * up(x)), gate and up in one matrix product. A family
without gates has down(activation(up(x))).

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.adapters.linear import AdaptableLinear
from workers.kernels.cpu.products import PackedProduct
from workers.kernels.device_kernels import Kernels
from workers.models.families.traits import Activation
from workers.models.layers.linear_layers import ColumnParallel, RowParallel, projections_of
from workers.models.model_config import ModelConfig
from workers.weights.encoding import LayerContext
from workers.weights.slots import Slot


def gate(activation: Activation, kernels: Kernels, gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up, [T, F], where the last dimension holds first all of gate, then all of up."""
    if activation == "silu":
        return kernels.silu_mul(gate_up_TF2)
    if activation == "gelu_tanh":
        return kernels.gelu_tanh_mul(gate_up_TF2)
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return kernels.activate(gate_TF, activation) * up_TF


class MLP:
    """An MLP. SiLU's gate is part of the product if the weight's encoding allows it."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig) -> None:
        total, names, size = config.intermediate_size, config.spec.tensors, context.parallel.size
        self._gated, self._activation = config.spec.gated, config.activation
        self._kernels = context.kernels
        share = range(context.parallel.rank * (total // size), (context.parallel.rank + 1) * (total // size))
        count = 2 if self._gated else 1
        self._gate_up = ColumnParallel(
            context,
            projections_of(prefix, names.gate_up, (total,) * count, (share,) * count, ((),) * count),
            config.hidden_size,
            bias=config.mlp_bias,
            gated=self._gated and config.activation == "silu",
        )
        self._down = RowParallel(context, f"{prefix}.{names.down}", total, config.hidden_size, bias=config.mlp_bias)

    @property
    def waits(self) -> bool:
        return False

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        inner_TF = self._gate_up(x_TE)
        if not self._gated:
            inner_TF = self._kernels.activate(inner_TF, self._activation)
        elif self._activation != "silu":
            inner_TF = gate(self._activation, self._kernels, inner_TF)
        return self._down(inner_TF)

    def packed_products(self) -> tuple[PackedProduct, PackedProduct] | None:
        """The products of gate and up, or of up alone, and of down."""
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
