"""silu(gate) * up and gelu(gate) * up in Triton: the two halves of one matrix product's output, read once.

Legend: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A thread takes 8 neighbouring elements of each half: loads of 16 bytes in bfloat16, two under way. Chosen by
# reasoning, not measured yet.
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _gate(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_F = columns_F < size
    gate_F = tl.load(gate_up_ptr + token * 2 * size + columns_F, mask=inside_F, other=0.0)
    up_F = tl.load(gate_up_ptr + token * 2 * size + size + columns_F, mask=inside_F, other=0.0)
    wide_F = gate_F.to(tl.float32)
    exponent_F = wide_F
    if GELU:  # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
        exponent_F = 1.5957691216057308 * (wide_F + 0.044715 * wide_F * wide_F * wide_F)
    exponent_F = tl.maximum(exponent_F, -88.0)  # the exponential stays finite
    active_F = (wide_F / (1.0 + tl.exp(-exponent_F))).to(gate_F.dtype)  # rounded where `reference` rounds
    out_F = active_F.to(tl.float32) * up_F.to(tl.float32)
    tl.store(out_ptr + token * size + columns_F, out_F.to(gate_F.dtype), mask=inside_F)


def silu_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """`reference.silu_mul` of a contiguous [T, 2 F]."""
    return _gated(gate_up_TF2, gelu=False)


def gelu_tanh_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """`reference.gelu_tanh_mul` of a contiguous [T, 2 F]."""
    return _gated(gate_up_TF2, gelu=True)


def _gated(gate_up_TF2: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    assert gate_up_TF2.dim() == 2, f"gate and up are {tuple(gate_up_TF2.shape)}"
    assert gate_up_TF2.shape[1] % 2 == 0, f"gate and up are {gate_up_TF2.shape[1]} wide"
    assert gate_up_TF2.is_contiguous(), f"gate and up have strides {gate_up_TF2.stride()}"
    num_tokens, size = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
    out_TF = torch.empty(num_tokens, size, dtype=gate_up_TF2.dtype, device=gate_up_TF2.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        _gate[grid](gate_up_TF2, out_TF, size, BLOCK=_BLOCK, GELU=gelu, num_warps=_NUM_WARPS)
    return out_TF
