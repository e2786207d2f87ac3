"""The seam between the decoder stack and the layers that a family chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from workers.adapters.linear import AdaptableLinear
from workers.attention.backend import AttentionBackend, CosSin
from workers.kernels.cpu.latent_layers import LatentWeights
from workers.kernels.cpu.products import PackedProduct
from workers.weights.slots import Slot


class AttentionLayer(Protocol):
    """Queries, keys and values of one layer, in and out of the residual stream. E is the hidden size, T tokens."""

    @property
    def window(self) -> int | None:
        """Positions that a token sees, itself included; None: all."""
        ...

    @property
    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights of the norms of queries and keys, each [head dim]."""
        ...

    @property
    def sinks_N(self) -> torch.Tensor | None:
        """[N] float32: an extra logit of each query head's softmax; or None."""
        ...

    @property
    def latents(self) -> LatentWeights | None:
        """Once packed, what compiled layers need besides the products, where the cache has latents."""
        ...

    def __call__(self, x_TE: torch.Tensor, rotation: CosSin, backend: AttentionBackend) -> torch.Tensor: ...

    def packed_products(self) -> tuple[PackedProduct | None, PackedProduct | None]:
        """The products of queries, keys and values (or latents), and of the output: what compiled layers can compute
        instead."""
        ...

    def linears(self) -> Iterator[AdaptableLinear]:
        """The layers that an adapter may change."""
        ...

    def pack(self) -> None: ...

    def slots(self) -> Iterator[Slot]: ...


class FeedForward(Protocol):
    """The other half of a layer: a gated MLP, or experts."""

    @property
    def waits(self) -> bool:
        """Whether a call waits for the device: then no CUDA graph can hold it."""
        ...

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor: ...

    def packed_products(self) -> tuple[PackedProduct, PackedProduct | None] | None:
        """The products that compiled layers can compute instead: gate and up, and down, or one product that is all of
        this half."""
        ...

    def linears(self) -> Iterator[AdaptableLinear]:
        """The layers that an adapter may change."""
        ...

    def pack(self) -> None: ...

    def slots(self) -> Iterator[Slot]: ...
