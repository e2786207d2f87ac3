"""Self-attention of one layer: projections, and the backend that turns queries and keys and pages them.

Legend: T tokens, E hidden size, N query heads, K key/value heads (both of this rank), D head dim, P D / 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.attention.base import AttentionBackend, CosSin
from workers.checkpoint.encoding import LayerContext, Projection
from workers.checkpoint.slots import Loadable, Slot
from workers.kernels.cpu.products import PackedProduct
from workers.models.config import ModelConfig
from workers.models.layers.linear import ColumnParallel, RowParallel
from workers.models.layers.norm import RMSNorm


class SelfAttention:
    """Each rank has N / tp query heads and their key/value heads: K / tp, or one that several ranks copy."""

    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> None:
        tp, rank, dim = context.parallel.size, context.parallel.rank, config.head_dim
        self._layer = layer
        self._head_dim = dim
        self._window = config.windows[layer]
        self._scale = dim**-0.5
        num_heads, num_kv_heads = config.num_heads // tp, max(1, config.num_kv_heads // tp)
        first_kv_head = rank * config.num_kv_heads // tp

        def heads(name: str, total: int, first: int, count: int) -> Projection:
            return Projection(name=f"{prefix}.{name}", total=total * dim, start=first * dim, size=count * dim)

        self._qkv = ColumnParallel(
            context,
            [
                heads("q_proj", config.num_heads, rank * num_heads, num_heads),
                heads("k_proj", config.num_kv_heads, first_kv_head, num_kv_heads),
                heads("v_proj", config.num_kv_heads, first_kv_head, num_kv_heads),
            ],
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self._norms: tuple[RMSNorm, ...] = ()
        if config.qk_norm:
            self._norms = tuple(
                RMSNorm(context, f"{prefix}.{name}", dim, config.norm_eps) for name in ("q_norm", "k_norm")
            )
        self._out = RowParallel(
            context, f"{prefix}.o_proj", config.num_heads * dim, config.hidden_size, bias=config.o_bias
        )

    def __call__(self, x_TE: torch.Tensor, rotation: CosSin, backend: AttentionBackend) -> torch.Tensor:
        heads = torch.split(self._qkv(x_TE), self._qkv.sizes, dim=-1)
        q_TND, k_TKD, v_TKD = (part.view(part.shape[0], -1, self._head_dim) for part in heads)
        if self._norms:
            q_norm, k_norm = self._norms
            q_TND, k_TKD = q_norm(q_TND), k_norm(k_TKD)
        q_TND = backend.write(self._layer, q_TND, k_TKD, v_TKD, rotation)
        out_TND = backend.attend(self._layer, q_TND, scale=self._scale, window=self._window)
        return self._out(out_TND.flatten(1))

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights of the norms of queries and keys, each [D]."""
        return (self._norms[0].weight, self._norms[1].weight) if self._norms else None

    def packed_products(self) -> tuple[PackedProduct | None, PackedProduct | None]:
        """Of queries, keys and values, and of the output."""
        return self._qkv.packed_product(), self._out.packed_product()

    def pack(self) -> None:
        self._qkv.pack()
        self._out.pack()

    def slots(self) -> Iterator[Slot]:
        parts: tuple[Loadable, ...] = (self._qkv, *self._norms, self._out)
        for part in parts:
            yield from part.slots()
