"""Self-attention of one layer: projections, and the backend that turns queries and keys and pages them.

Legend: T tokens, E hidden size, N query heads, K key/value heads (both of this rank), D head dim, P D / 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.adapters.linear import AdaptableLinear
from workers.attention.backend import AttentionBackend, AttentionOptions, CosSin
from workers.kernels.cpu.products import PackedProduct
from workers.models.layers.growth import StepGrowth
from workers.models.layers.linear_layers import ColumnParallel, RowParallel, projections_of
from workers.models.layers.norm import AllHeadsNorm, RMSNorm
from workers.models.layers.rope import head_order
from workers.models.model_config import ModelConfig
from workers.weights.encoding import LayerContext
from workers.weights.slots import Loadable, Slot


class SelfAttention:
    """A rank has N / tp query heads and their key/value heads: K / tp, or one that several ranks copy."""

    def __init__(
        self, context: LayerContext, prefix: str, config: ModelConfig, layer: int, *, num_inputs: int | None = None
    ) -> None:
        """`num_inputs` where the layer reads more than the residual stream."""
        tp, rank, dim = context.parallel.size, context.parallel.rank, config.head_dim
        self._layer = layer
        self._head_dim = dim
        num_heads, num_kv_heads = config.num_heads // tp, max(1, config.num_kv_heads // tp)
        first_kv_head = rank * config.num_kv_heads // tp
        heads = range(rank * num_heads * dim, (rank + 1) * num_heads * dim)
        kv_heads = range(first_kv_head * dim, (first_kv_head + num_kv_heads) * dim)
        total, kv_total, names = config.num_heads * dim, config.num_kv_heads * dim, config.spec.tensors
        order = head_order(dim, config.rotary_dim, interleaved=config.spec.interleaved_rope)
        self._qkv = ColumnParallel(
            context,
            projections_of(
                prefix, names.qkv, (total, kv_total, kv_total), (heads, kv_heads, kv_heads), (order, order, ())
            ),
            num_inputs or config.hidden_size,
            bias=config.qkv_bias,
        )
        self._norms: tuple[RMSNorm | AllHeadsNorm, ...] = ()
        parts = (("q_norm", total, heads), ("k_norm", kv_total, kv_heads))
        if config.qk_norm is not None:
            self._norms = tuple(
                _head_norm(context, f"{prefix}.{name}", config, all_heads, share, order)
                for name, all_heads, share in parts
            )
        self._options = AttentionOptions(
            scale=config.attention_scale,
            window=config.windows[layer],
            softcap=config.scales.attention_softcap,
            sinks_N=torch.empty(num_heads, device=context.device) if config.spec.sinks else None,
        )
        self._sinks_slots: tuple[Slot, ...] = ()
        if self.sinks_N is not None:
            shape, start = (config.num_heads,), rank * num_heads
            self._sinks_slots = (Slot(name=f"{prefix}.sinks", shape=shape, target=self.sinks_N, start=start),)
        self.growth: StepGrowth | None = None
        self._out = RowParallel(context, f"{prefix}.{names.out}", total, config.hidden_size, bias=config.o_bias)

    def __call__(self, x_TE: torch.Tensor, rotation: CosSin, backend: AttentionBackend) -> torch.Tensor:
        heads = torch.split(self._qkv(x_TE), self._qkv.sizes, dim=-1)
        q_TND, k_TKD, v_TKD = (part.view(part.shape[0], -1, self._head_dim) for part in heads)
        if self._norms:
            q_norm, k_norm = self._norms
            q_TND, k_TKD = q_norm(q_TND), k_norm(k_TKD)
        if self.growth is not None:
            q_TND = self.growth(q_TND)
        q_TND = backend.write(self._layer, q_TND, k_TKD, v_TKD, rotation)
        out_TND = backend.attend(self._layer, q_TND, self._options)
        return self._out(out_TND.flatten(1))

    @property
    def window(self) -> int | None:
        return self._options.window

    @property
    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights of the norms of queries and keys, each [D]."""
        return (self._norms[0].weight, self._norms[1].weight) if self._norms else None

    @property
    def sinks_N(self) -> torch.Tensor | None:
        return self._options.sinks_N

    @property
    def latents(self) -> None:
        return None

    def packed_products(self) -> tuple[PackedProduct | None, PackedProduct | None]:
        """The products of queries, keys and values, and of the output."""
        return self._qkv.packed_product(), self._out.packed_product()

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._qkv, self._out)

    def pack(self) -> None:
        self._qkv.pack()
        self._out.pack()

    def slots(self) -> Iterator[Slot]:
        parts: tuple[Loadable, ...] = (self._qkv, *self._norms, self._out)
        for part in parts:
            yield from part.slots()
        yield from self._sinks_slots


def _head_norm(
    context: LayerContext, name: str, config: ModelConfig, total: int, share: range, order: tuple[int, ...]
) -> RMSNorm | AllHeadsNorm:
    """The norm of queries or keys: `total` numbers over all ranks."""
    kind = config.norm
    if config.qk_norm == "head":
        return RMSNorm(context, name, config.head_dim, kind.eps, offset=kind.offset, wide=kind.wide, order=order)
    copies = context.parallel.size * len(share) // total
    return AllHeadsNorm(context, name, total=total, share=share, kind=kind, copies=copies, order=order)
