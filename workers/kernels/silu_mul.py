"""silu(gate) * up in Triton: the two halves of one matrix product's output, read once.

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
def _silu_mul(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_F = columns_F < size
    gate_F = tl.load(gate_up_ptr + token * 2 * size + columns_F, mask=inside_F, other=0.0)
    up_F = tl.load(gate_up_ptr + token * 2 * size + size + columns_F, mask=inside_F, other=0.0)
    wide_F = gate_F.to(tl.float32)
    silu_F = (wide_F / (1.0 + tl.exp(-wide_F))).to(gate_F.dtype)  # rounded where `reference` rounds
    out_F = silu_F.to(tl.float32) * up_F.to(tl.float32)
    tl.store(out_ptr + token * size + columns_F, out_F.to(gate_F.dtype), mask=inside_F)


def silu_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """`reference.silu_mul` of a contiguous [T, 2 F]."""
    assert gate_up_TF2.dim() == 2, f"gate and up are {tuple(gate_up_TF2.shape)}"
    assert gate_up_TF2.shape[1] % 2 == 0, f"gate and up are {gate_up_TF2.shape[1]} wide"
    assert gate_up_TF2.is_contiguous(), f"gate and up have strides {gate_up_TF2.stride()}"
    num_tokens, size = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
    out_TF = torch.empty(num_tokens, size, dtype=gate_up_TF2.dtype, device=gate_up_TF2.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        _silu_mul[grid](gate_up_TF2, out_TF, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out_TF
