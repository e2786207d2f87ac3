"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one matrix product.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.checkpoint.encoding import LayerContext, Projection
from workers.checkpoint.slots import Slot
from workers.kernels.cpu.products import PackedProduct
from workers.models.config import ModelConfig
from workers.models.layers.linear import ColumnParallel, RowParallel


class GatedMLP:
    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> None:
        total = config.intermediate_size
        size = total // context.parallel.size
        start = context.parallel.rank * size
        projections = [
            Projection(name=f"{prefix}.{name}", total=total, start=start, size=size)
            for name in ("gate_proj", "up_proj")
        ]
        self._gate_up = ColumnParallel(context, projections, config.hidden_size, bias=config.mlp_bias, gated=True)
        self._down = RowParallel(context, f"{prefix}.down_proj", total, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate_up(x_TE))

    def packed_products(self) -> tuple[PackedProduct | None, PackedProduct | None]:
        """Of gate and up, and down."""
        return self._gate_up.packed_product(), self._down.packed_product()

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def slots(self) -> Iterator[Slot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()
