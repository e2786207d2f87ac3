"""The kernels of CUDA devices, in Triton, under the names of `base.Kernels`. Importing it imports triton."""

from __future__ import annotations

from workers.kernels.blocks import gather, scatter
from workers.kernels.quantised.product import quantised_product
from workers.kernels.reference import head_products
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.silu_mul import silu_mul
from workers.kernels.vocab import embed, join

__all__ = [
    "add_rms_norm",
    "embed",
    "gather",
    "head_products",
    "join",
    "quantised_product",
    "rms_norm",
    "rope_kv_write",
    "scatter",
    "silu_mul",
]
