"""Latent attention of one layer (DeepSeek-V2, https://arxiv.org/abs/2405.04434, 2.1), in its absorbed form.

    x ── down ──▶ c_q ── norm ── up ──▶ q_nope, q_rope      q_nope W_UK, q_rope ──▶ query [rank + rope]  of each head
              └─▶ c_kv, k_rope ── norm of c_kv ──▶ latent [rank + rope]: the key of all heads; c_kv is its value, too
    attention over latents [rank] ── W_UV ──▶ heads' values ── out

W_UK and W_UV are the halves of kv_b_proj. A prompt takes the same form as a token that decodes: keys and values are
never made from latents, so a token has the same bits in either. Ranks share the heads; each computes all of the latent.

Legend: T tokens, E hidden size, N query heads of this rank, Q of a query, L rank of the latent, R rotated dimensions,
W = L + R, P the dimensions of a key or a value that kv_b_proj makes, O its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.adapters.linear import AdaptableLinear
from workers.attention.backend import AttentionBackend, AttentionOptions, CosSin
from workers.kernels.cpu.latent_layers import LatentWeights
from workers.kernels.cpu.products import PackedProduct
from workers.models.layers.linear_layers import ColumnParallel, RowParallel
from workers.models.layers.norm import RMSNorm
from workers.models.layers.rope import head_order
from workers.models.model_config import ModelConfig
from workers.weights.encoding import LayerContext, Projection, WeightShare
from workers.weights.slots import Loadable, Slot

_EPS = 1e-6  # of the norms of latents, in every config


class LatentAttention:
    def __init__(self, context: LayerContext, prefix: str, config: ModelConfig, layer: int) -> None:
        assert config.latent is not None, "the config has no latent attention"
        self._latent, self._layer = config.latent, layer
        self._kernels, self._dtype = context.kernels, context.dtype
        tp, rank, latent = context.parallel.size, context.parallel.rank, self._latent
        self._num_heads = config.num_heads // tp
        self._options = AttentionOptions(scale=config.attention_scale, window=None, value_dim=latent.rank)

        def of_heads(name: str, dim: int, order: tuple[int, ...] = ()) -> Projection:
            size = self._num_heads * dim
            return Projection(
                name=f"{prefix}.{name}", total=config.num_heads * dim, start=rank * size, size=size, order=order
            )

        def whole(name: str, size: int, order: tuple[int, ...] = ()) -> Projection:
            return Projection(name=f"{prefix}.{name}", total=size, start=0, size=size, order=order)

        query = ("q_proj" if latent.query_rank is None else "q_b_proj", latent.query_dim, self._order(latent.nope_dim))
        first = of_heads(*query) if latent.query_rank is None else whole("q_a_proj", latent.query_rank)
        down = whole("kv_a_proj_with_mqa", latent.width, self._order(latent.rank))
        self._down = ColumnParallel(context, [first, down], config.hidden_size, bias=False)
        self._query: tuple[RMSNorm, ColumnParallel] | None = None
        if latent.query_rank is not None:
            norm = RMSNorm(context, f"{prefix}.q_a_layernorm", latent.query_rank, _EPS)
            self._query = norm, ColumnParallel(context, [of_heads(*query)], latent.query_rank, bias=False)
        self._norm = RMSNorm(context, f"{prefix}.kv_a_layernorm", latent.rank, _EPS)
        up = of_heads("kv_b_proj", latent.nope_dim + latent.value_dim)
        self._up = context.matrix(
            WeightShare(projections=(up,), total_inputs=latent.rank, first_input=0, num_inputs=latent.rank)
        )
        self._absorbed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._out = RowParallel(
            context, f"{prefix}.o_proj", config.num_heads * latent.value_dim, config.hidden_size, bias=False
        )

    def __call__(self, x_TE: torch.Tensor, rotation: CosSin, backend: AttentionBackend) -> torch.Tensor:
        rank, nope_dim = self._latent.rank, self._latent.nope_dim
        query_TQ, down_TW = torch.split(self._down(x_TE), self._down.sizes, dim=-1)
        if self._query is not None:
            norm, up = self._query
            query_TQ = up(_normed(norm, query_TQ))
        q_TNQ = query_TQ.view(len(x_TE), self._num_heads, -1)
        latent_T1W = torch.cat((_normed(self._norm, down_TW[:, :rank]), down_TW[:, rank:]), dim=1).unsqueeze(1)
        keys_NPL, values_NLP = self._halves()
        q_TNL = self._kernels.head_products(q_TNQ[..., :nope_dim], keys_NPL)
        q_TNW = torch.cat((q_TNL, q_TNQ[..., nope_dim:]), dim=-1)
        q_TNW = backend.write(self._layer, q_TNW, latent_T1W, latent_T1W[..., :rank], rotation)
        out_TNL = backend.attend(self._layer, q_TNW, self._options)
        return self._out(self._kernels.head_products(out_TNL, values_NLP).flatten(1))

    def _order(self, num_still: int) -> tuple[int, ...]:
        """The order of a head's outputs: `num_still` unrotated ones first."""
        size = self._latent.rope_dim
        turned = head_order(size, size, interleaved=self._latent.interleaved) or tuple(range(size))
        order = (*range(num_still), *(num_still + place for place in turned))
        return () if order == tuple(range(num_still + size)) else order

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [N, P, L] and W_UV [N, L, P], in floating point; the checkpoint may have another encoding."""
        if self._absorbed is None:
            latent = self._latent
            weight_NOL = self._up.dequantised().to(self._dtype).view(self._num_heads, -1, latent.rank)
            keys_NPL, values_NPL = weight_NOL[:, : latent.nope_dim], weight_NOL[:, latent.nope_dim :]
            self._absorbed = keys_NPL.contiguous(), values_NPL.transpose(1, 2).contiguous()
        return self._absorbed

    @property
    def window(self) -> int | None:
        return None

    @property
    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    @property
    def sinks_N(self) -> torch.Tensor | None:
        return None

    @property
    def latents(self) -> LatentWeights | None:
        query = None
        if self._query is not None:
            norm, up = self._query
            product = up.packed_product()
            if product is None:
                return None
            query = norm.weight, product
        keys_NPL, values_NLP = self._halves()
        return LatentWeights(
            query=query,
            norm_L=self._norm.weight,
            keys_NPL=keys_NPL,
            values_NLP=values_NLP,
            rope_dim=self._latent.rope_dim,
            eps=_EPS,
        )

    def packed_products(self) -> tuple[PackedProduct | None, PackedProduct | None]:
        """The products that make queries and latents, and that of the output."""
        if self._query is not None and self._query[1].packed_product() is None:
            return None, None
        return self._down.packed_product(), self._out.packed_product()

    def linears(self) -> Iterator[AdaptableLinear]:
        """All but kv_b_proj, whose halves are part of queries and values."""
        yield from (self._down, *(self._query or ())[1:], self._out)

    def pack(self) -> None:
        self._halves()
        del self._up
        for part in (self._down, *(self._query or ())[1:], self._out):
            part.pack()

    def slots(self) -> Iterator[Slot]:
        parts: tuple[Loadable, ...] = (self._down, *(self._query or ()), self._norm, self._up, self._out)
        for part in parts:
            yield from part.slots()


def _normed(norm: RMSNorm, x_TI: torch.Tensor) -> torch.Tensor:
    """Normalises columns of wider rows: kernels read them as a head."""
    return norm(x_TI.unsqueeze(1)).squeeze(1)
