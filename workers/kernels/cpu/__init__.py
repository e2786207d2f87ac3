"""The CPU's kernels: compiled ones for contiguous float32 and bfloat16 tensors, their twins in torch for all else.

Legend: T tokens, E hidden size, F intermediate size, H heads (of queries or keys), K key/value heads, D head dim,
P D / 2 rotated pairs, NB blocks of the cache, BS positions of a block.
"""

from __future__ import annotations

import torch

from workers.kernels import reference
from workers.kernels.cpu.build import native

gather = reference.gather
scatter = reference.scatter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `reference.rms_norm`; `x` may be heads [T, H, D] cut out of a wider tensor."""
    kernels = native(x.dtype)
    heads = x if x.dim() == 3 else x.view(-1, 1, x.shape[-1]) if x.is_contiguous() else None
    if kernels is None or heads is None or not _has_whole_rows(heads):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = len(heads), heads.stride(0), heads.shape[1], heads.shape[2]
    kernels.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes, eps, torch.get_num_threads())
    return out


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = native(x_TE.dtype)
    if kernels is None or not (x_TE.is_contiguous() and residual_TE.is_contiguous()):
        return reference.add_rms_norm(x_TE, residual_TE, weight_E, eps)
    normed_TE, stream_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
    tensors = x_TE, residual_TE, weight_E, normed_TE, stream_TE
    kernels.add_rms_norm(*(tensor.data_ptr() for tensor in tensors), *x_TE.shape, eps, torch.get_num_threads())
    return normed_TE, stream_TE


def silu_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    kernels = native(gate_up_TF2.dtype)
    if kernels is None or not gate_up_TF2.is_contiguous():
        return reference.silu_mul(gate_up_TF2)
    num_tokens, size = len(gate_up_TF2), gate_up_TF2.shape[1] // 2
    out_TF = torch.empty(num_tokens, size, dtype=gate_up_TF2.dtype)
    kernels.silu_mul(gate_up_TF2.data_ptr(), out_TF.data_ptr(), num_tokens, size, torch.get_num_threads())
    return out_TF


def rope_kv_write(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    kernels = native(q_TND.dtype)
    heads, plain = (q_TND, k_TKD, v_TKD), (cos_TP, sin_TP, k_cache, v_cache, slots_T)
    if (
        kernels is None
        or k_cache.dtype != q_TND.dtype
        or not all(_has_whole_rows(part) for part in heads)
        or not all(part.is_contiguous() for part in plain)
    ):
        return reference.rope_kv_write(q_TND, k_TKD, v_TKD, cos_TP, sin_TP, k_cache, v_cache, slots_T)
    turned_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
    kernels.rope_kv_write(
        *(part.data_ptr() for part in heads),
        *(part.stride(0) for part in heads),
        *(part.data_ptr() for part in (cos_TP, sin_TP, turned_TND, k_cache, v_cache, slots_T)),
        *q_TND.shape[:2],
        *k_cache.shape[1:2],
        q_TND.shape[2],
        k_cache.shape[2],
        torch.get_num_threads(),
    )
    return turned_TND


def _has_whole_rows(x_THD: torch.Tensor) -> bool:
    """Does each token's part of it lie in one piece?"""
    return x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
