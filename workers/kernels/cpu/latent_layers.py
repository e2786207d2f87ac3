"""Latent attention of a layer as compiled layers take it (`Latents` in layers.cpp).

Legend: N query heads, P the dimensions of a head's key or value, L rank of the latent, E a rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels.cpu.native_build import pointers
from workers.kernels.cpu.products import PackedProduct, Parts, ProductParts, parts_of

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """One layer's weights. `query` has the norm of compressed queries and the product that makes queries of them, or
    is None where they are not compressed."""

    query: tuple[torch.Tensor, PackedProduct] | None
    norm_L: torch.Tensor
    keys_NPL: torch.Tensor
    values_NLP: torch.Tensor
    rope_dim: int
    eps: float  # of both norms


class _LayerLatents(ctypes.Structure):
    _fields_ = (
        ("query", ProductParts),
        *((name, _P) for name in ("query_norm", "norm", "keys", "values")),
        *((name, _N) for name in ("query_rank", "rank", "rope_dim", "nope_dim", "value_dim")),
        ("eps", _F),
    )  # fmt: skip


class PackedLatents:
    """The latent weights of all layers of a model, which have the same sizes."""

    def __init__(self, layers: Sequence[LatentWeights]) -> None:
        first = layers[0]
        self.num_heads, nope_dim, rank = first.keys_NPL.shape
        self.num_values = self.num_heads * first.values_NLP.shape[2]  # that the attention's output is made of
        parts = [parts_of(layer.query and layer.query[1]) for layer in layers]
        self.query_rank = 0 if first.query is None else len(first.query[0])
        self.query_depth = max((part.num_inputs for row in parts for part in row), default=0)
        query_dim, width = nope_dim + first.rope_dim, rank + first.rope_dim
        self.plain_widths = {"turned": self.num_heads * width, "of_latents": self.num_heads * rank} | (
            {"queries": self.num_heads * query_dim} if self.query_rank else {}
        )
        self._structures = [_structure(*pair) for pair in zip(layers, parts, strict=True)]
        self._kept = tuple(layers), parts  # the structures hold only their addresses

    @property
    def addresses(self) -> list[int]:
        return [ctypes.addressof(structure) for structure in self._structures]


def packed_latents(layers: Sequence[LatentWeights | None]) -> PackedLatents | None:
    """None where the cache has keys and values."""
    latents = [layer for layer in layers if layer is not None]
    assert len(latents) in (0, len(layers)), "all layers of a model have latents, or none"
    return PackedLatents(latents) if latents else None


def _structure(layer: LatentWeights, parts: Parts) -> _LayerLatents:
    _, nope_dim, rank = layer.keys_NPL.shape
    query_norm = layer.query[0] if layer.query is not None else None
    tensors = pointers(query_norm, layer.norm_L, layer.keys_NPL, layer.values_NLP)
    return _LayerLatents(
        query=ProductParts(parts=parts, num_parts=len(parts)),
        **dict(zip(("query_norm", "norm", "keys", "values"), tensors, strict=True)),
        query_rank=0 if query_norm is None else len(query_norm),
        rank=rank, rope_dim=layer.rope_dim, nope_dim=nope_dim, value_dim=layer.values_NLP.shape[2], eps=layer.eps,
    )  # fmt: skip
