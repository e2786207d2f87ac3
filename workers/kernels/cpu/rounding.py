"""Rounds float weights to levels by compiled code: `rounding.cpp`, with the bits of torch's operations.

Legend: O outputs, I inputs, G groups, W bytes of a row of codes.
"""

from __future__ import annotations

import torch

from workers.kernels.cpu.native_build import native, pointers


def can_round(weight_OI: torch.Tensor) -> bool:
    """Whether the weight is on the CPU in a type that compiled code reads, with rows of adjacent inputs."""
    return weight_OI.device.type == "cpu" and weight_OI.stride(1) == 1 and native(weight_OI.dtype) is not None


def largest_of_groups(weight_OI: torch.Tensor, group_size: int) -> torch.Tensor:
    """[O, G], float32: the largest magnitude of each group of inputs."""
    kernels = native(weight_OI.dtype)
    assert kernels is not None
    num_outputs, num_inputs = weight_OI.shape
    largest_OG = torch.empty(num_outputs, -(-num_inputs // group_size))
    sizes = num_outputs, num_inputs, group_size, torch.get_num_threads()
    kernels.largest(weight_OI.data_ptr(), weight_OI.stride(0), largest_OG.data_ptr(), *sizes)
    return largest_OG


def round_rows(
    weight_OI: torch.Tensor, scale_OG: torch.Tensor, group_size: int, *, bits: int | None, codes_OW: torch.Tensor
) -> None:
    """Writes dense streams of 4 or 8 bits, with 2**(bits - 1) for level 0; or, without `bits`, e4m3. Scales are of any
    floating-point type and above 0."""
    kernels = native(weight_OI.dtype)
    assert kernels is not None
    assert codes_OW.is_contiguous()
    assert bits in (None, 4, 8)
    scale_OG = scale_OG.float().contiguous()
    sizes = *weight_OI.shape, group_size, bits or 0, torch.get_num_threads()
    kernels.round_rows(weight_OI.data_ptr(), weight_OI.stride(0), *pointers(scale_OG, codes_OW), *sizes)
