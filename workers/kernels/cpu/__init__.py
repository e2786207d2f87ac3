"""The CPU's kernels: compiled ones for contiguous float32 and bfloat16 tensors, their twins in torch for all else.

Legend: T tokens, E hidden size, F intermediate size, H heads (of queries or keys), K key/value heads, D head dim,
P D / 2 rotated pairs, NB blocks of the cache, BS positions of a block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from workers.kernels import twins
from workers.kernels.cpu.native_build import native, native_tiles, pointers
from workers.kernels.cpu.norms import ACTIVATIONS, CompiledNorm, rms_kind
from workers.kernels.cpu.pages import LayerCache
from workers.kernels.cpu.regions import apart, empty_rows
from workers.kernels.device_kernels import KVScales

embed = twins.embed
join = twins.join
gather = twins.gather
scatter = twins.scatter
grouped_experts = twins.grouped_experts
quantised_product = twins.quantised_product


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`twins.rms_norm`. `x` may be heads [T, H, D] cut out of a wider tensor."""
    kind = rms_kind(weight, x.dtype)
    out = None if kind is None else _norm(x, weight, None, eps, kind)
    return twins.rms_norm(x, weight, eps) if out is None else out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    out = _norm(x, weight, bias, eps, CompiledNorm.CENTRED)
    return twins.layer_norm(x, weight, bias, eps) if out is None else out


def _norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: CompiledNorm
) -> torch.Tensor | None:
    """Returns None if no compiled kernel exists."""
    kernels = native(x.dtype)
    heads = x if x.dim() == 3 else x.view(-1, 1, x.shape[-1]) if x.is_contiguous() else None
    if kernels is None or heads is None or not has_whole_rows(heads):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    num_tokens, num_heads, size = heads.shape
    sizes = num_tokens, heads.stride(0), num_heads * size, num_heads, size
    kernels.norm(*pointers(x, weight, bias, out), *sizes, eps, kind, torch.get_num_threads())
    return out


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels, kind = native(x_TE.dtype), rms_kind(weight_E, x_TE.dtype)
    if kernels is None or kind is None or not (x_TE.is_contiguous() and residual_TE.is_contiguous()):
        return twins.add_rms_norm(x_TE, residual_TE, weight_E, eps)
    num_tokens, size = x_TE.shape
    normed_TE = empty_rows(num_tokens, size, dtype=x_TE.dtype, stride=_stride(size, x_TE.dtype))
    stream_TE = empty_rows(num_tokens, size, dtype=x_TE.dtype)
    tensors = pointers(x_TE, residual_TE, weight_E, None, normed_TE, stream_TE)
    kernels.add_norm(*tensors, num_tokens, size, normed_TE.stride(0), eps, kind, torch.get_num_threads())
    return normed_TE, stream_TE


def silu_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    kernels = native(gate_up_TF2.dtype)
    if kernels is None or not gate_up_TF2.is_contiguous():
        return twins.silu_mul(gate_up_TF2)
    return _gated(gate_up_TF2, kernels.silu_mul)


def gelu_tanh_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    kernels = native(gate_up_TF2.dtype)
    if kernels is None or not gate_up_TF2.is_contiguous():
        return twins.gelu_tanh_mul(gate_up_TF2)
    return _gated(gate_up_TF2, kernels.gelu_tanh_mul)


def _gated(gate_up_TF2: torch.Tensor, compiled: Callable[..., None]) -> torch.Tensor:
    num_tokens, size = gate_up_TF2.shape
    out_TF = torch.empty(num_tokens, size // 2, dtype=gate_up_TF2.dtype)
    compiled(*pointers(gate_up_TF2, out_TF), num_tokens, size // 2, size // 2, torch.get_num_threads())
    return out_TF


def activate(x_TF: torch.Tensor, activation: str) -> torch.Tensor:
    kernels, kind = native(x_TF.dtype), ACTIVATIONS.get(activation)
    if kernels is None or kind is None or x_TF.stride(1) != 1:
        return twins.activate(x_TF, activation)
    num_tokens, size = x_TF.shape
    out_TF = empty_rows(num_tokens, size, dtype=x_TF.dtype, stride=_stride(size, x_TF.dtype))
    sizes = num_tokens, size, x_TF.stride(0), out_TF.stride(0)
    kernels.activate(*pointers(x_TF, out_TF), *sizes, kind, torch.get_num_threads())
    return out_TF


def head_products(x_TNI: torch.Tensor, weight_NIO: torch.Tensor) -> torch.Tensor:
    """`twins.head_products`. A token's bits do not depend on the others."""
    kernels = native(x_TNI.dtype)
    if kernels is None or weight_NIO.dtype != x_TNI.dtype or x_TNI.stride(2) != 1 or not weight_NIO.is_contiguous():
        return twins.head_products(x_TNI, weight_NIO)
    num_tokens, num_heads, _ = x_TNI.shape
    num_outputs = weight_NIO.shape[2]
    out_TNO = torch.empty(num_tokens, num_heads, num_outputs, dtype=x_TNI.dtype)
    strides = *x_TNI.stride()[:2], num_heads * num_outputs, num_outputs
    sizes = *x_TNI.shape, num_outputs, *strides, torch.get_num_threads()
    kernels.head_products(*pointers(x_TNI, weight_NIO, out_TNO), *sizes)
    return out_TNO


def rope_kv_write(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    kernels = native(q_TND.dtype)
    cache = LayerCache(keys=k_cache, values=v_cache, scales=scales)
    if (
        kernels is None
        or (scales is None and k_cache.dtype != q_TND.dtype)
        or not (has_whole_rows(q_TND) and has_whole_rows(k_TKD) and has_whole_rows(v_TKD))
        or not (cache.is_contiguous and all(part.is_contiguous() for part in (cos_TP, sin_TP, slots_T)))
    ):
        return twins.rope_kv_write(q_TND, k_TKD, v_TKD, cos_TP, sin_TP, k_cache, v_cache, slots_T, scales)
    num_tokens, num_heads, head_dim = q_TND.shape
    turned_TND = empty_heads(q_TND, _stride(num_heads * head_dim, q_TND.dtype))
    kernels.rope_kv_write(
        *pointers(q_TND, k_TKD, v_TKD),
        *(part.stride(0) for part in (q_TND, k_TKD, v_TKD, turned_TND)),
        *pointers(cos_TP, sin_TP, turned_TND),
        ctypes.byref(cache.described()), slots_T.data_ptr(),
        num_tokens, num_heads, k_TKD.shape[1], head_dim, k_cache.shape[2], torch.get_num_threads(),
    )  # fmt: skip
    return turned_TND


def _stride(width: int, dtype: torch.dtype) -> int:
    return apart(width, dtype) if dtype == torch.bfloat16 and native_tiles() is not None else width


def empty_heads(x_TND: torch.Tensor, stride: int) -> torch.Tensor:
    """An uninitialised tensor of the same shape and dtype, with `stride` elements from token to token."""
    num_tokens, num_heads, head_dim = x_TND.shape
    rows = empty_rows(num_tokens, num_heads * head_dim, dtype=x_TND.dtype, stride=stride)
    return rows.view(num_tokens, num_heads, head_dim)


def has_whole_rows(x_THD: torch.Tensor) -> bool:
    _, of_head, of_number = x_THD.stride()
    return of_number == 1 and of_head == x_THD.shape[2]
