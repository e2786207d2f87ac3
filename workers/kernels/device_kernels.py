"""The interface between the layers and each device's kernels. A device's module is imported when it is chosen.

Legend: T tokens, E hidden size, F intermediate size, H heads (of queries or keys), K key/value heads, D head dim, P D /
2 rotated pairs, NB blocks of the cache, BS positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol, cast

import torch

from protos.errors import Misconfigured
from workers.quantization.quantised_weight import QuantisedWeight

_MODULES = {"cpu": "workers.kernels.cpu", "cuda": "workers.kernels.cuda"}


KVScales = tuple[torch.Tensor, torch.Tensor]
"""Scales of keys and of values in 8 bits. int8: each token's, in the cache, [NB, K, BS] in float32. fp8: each head's,
[K] in float32."""


class QuantisedProduct(Protocol):
    """y = x W^T (+ b) with a quantised weight that was packed once: [T, O] in x's type."""

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor: ...


ExpertWeight = torch.Tensor | QuantisedProduct
"""One expert's weight: [O, I] in floating point, or the product that this device's kernels made of a quantised
weight."""


class ExpertsSum(Protocol):
    """The sum [T, E], float32, of each token's experts [T, S], by the weights of its slots and in their order."""

    def __call__(self, x_TE: torch.Tensor, chosen_TS: torch.Tensor, weights_TS: torch.Tensor) -> torch.Tensor: ...


class Kernels(Protocol):
    """The functions of a kernel module. `workers.kernels.twins` has a readable twin of each."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...
    def silu_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor: ...
    def gelu_tanh_mul(self, gate_up_TF2: torch.Tensor) -> torch.Tensor: ...
    def activate(self, x_TF: torch.Tensor, activation: str) -> torch.Tensor: ...
    def embed(self, token_ids_T: torch.Tensor, table_SE: torch.Tensor, start: int) -> torch.Tensor: ...
    def join(self, parts_PRS: torch.Tensor, vocab_size: int) -> torch.Tensor: ...
    def rope_kv_write(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cos_TP: torch.Tensor,
        sin_TP: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots_T: torch.Tensor,
        scales: KVScales | None = None,
    ) -> torch.Tensor: ...
    def head_products(self, x_TNI: torch.Tensor, weight_NIO: torch.Tensor) -> torch.Tensor: ...
    def gather(self, cache: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...
    def grouped_experts(
        self,
        gate_up: Mapping[int, ExpertWeight],
        down: Mapping[int, ExpertWeight],
        gate: Callable[[torch.Tensor], torch.Tensor],
        *,
        num_experts: int,
        gate_up_biases: Mapping[int, torch.Tensor] | None = None,
        down_biases: Mapping[int, torch.Tensor] | None = None,
    ) -> ExpertsSum | None: ...
    def quantised_product(self, weight: QuantisedWeight) -> QuantisedProduct | None: ...
    def scatter(self, cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor) -> None: ...


def kernels_for(device: str) -> Kernels:
    """The kernels of a torch device such as "cpu" or "cuda:1". Raises Misconfigured for one without any."""
    kind = torch.device(device).type
    if kind not in _MODULES:
        raise Misconfigured(f"device {device!r} has no kernels: choose one of {', '.join(_MODULES)}", param="device")
    return cast(Kernels, import_module(_MODULES[kind]))
