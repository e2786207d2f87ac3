"""The kernels of CUDA devices, in Triton, under the names of `base.Kernels`. Importing it imports triton."""

from __future__ import annotations

from workers.kernels.block_copies import gather, scatter
from workers.kernels.experts.grouped_experts import grouped_experts
from workers.kernels.quantised.product_choice import quantised_product
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from workers.kernels.twins import activate, head_products, layer_norm
from workers.kernels.vocab import embed, join

__all__ = [
    "activate",
    "add_rms_norm",
    "embed",
    "gather",
    "gelu_tanh_mul",
    "grouped_experts",
    "head_products",
    "join",
    "layer_norm",
    "quantised_product",
    "rms_norm",
    "rope_kv_write",
    "scatter",
    "silu_mul",
]
