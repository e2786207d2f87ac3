"""Addresses of the experts' tensors, which lie where they were loaded. Legend: X experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNMENT = 16  # bytes, of what the kernels load at once


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def addresses(tensors: Mapping[int, torch.Tensor], num_experts: int) -> torch.Tensor:
    """int64 [X]; 0 where this rank has no such expert. The tensors must be kept."""
    device = next(iter(tensors.values())).device
    return torch.tensor(
        [tensors[expert].data_ptr() if expert in tensors else 0 for expert in range(num_experts)], device=device
    )
