"""Rounding a float weight to the nearest level. Integers have a scale for each group of inputs, by compressed-tensors'
rule: the group's largest magnitude / ((2**bits - 1) / 2), symmetric.

Legend: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protos.errors import BadCheckpoint
from workers.kernels.cpu.rounding import can_round, largest_of_groups, round_rows
from workers.quantization.bit_stream import pack_bits, packed_bytes, tiles_of
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

_LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRounding:
    """The last group is smaller where `group_size` does not divide the inputs."""

    bits: int
    group_size: int

    @property
    def zero(self) -> int:
        """The code of level 0."""
        return 1 << (self.bits - 1)

    def scales(self, weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[O, G] in `dtype`. A group of zeros has the scale 1; that of a group with NaN or infinity is not finite."""
        if can_round(weight_OI):
            largest_OG = largest_of_groups(weight_OI, self.group_size)
        else:
            groups = torch.split(weight_OI.float().abs(), self.group_size, dim=1)
            largest_OG = torch.stack([group.amax(dim=1) for group in groups], dim=1)
        scale_OG = (largest_OG / ((2**self.bits - 1) / 2)).to(dtype)
        return torch.where(scale_OG == 0, 1.0, scale_OG).to(dtype)

    def spread(self, scale_OG: torch.Tensor, num_inputs: int) -> torch.Tensor:
        """[O, I], float32: the scale of each input."""
        return scale_OG.float().repeat_interleave(self.group_size, dim=1)[:, :num_inputs]

    def levels(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Whole numbers from -2**(bits - 1) to 2**(bits - 1) - 1, float32; `scale` has the weight's shape."""
        return (weight.float() / scale).round_().clamp_(-self.zero, self.zero - 1)

    def rounded(self, weight_OI: torch.Tensor, scale_OG: torch.Tensor | None = None) -> torch.Tensor:
        """The rounded weight [O, I], float32."""
        scale_OG = self.scales(weight_OI, torch.float32) if scale_OG is None else scale_OG
        scale_OI = self.spread(scale_OG, weight_OI.shape[1])
        return self.levels(weight_OI, scale_OI).mul_(scale_OI)

    def codes(self, levels_OI: torch.Tensor) -> torch.Tensor:
        """A dense stream, uint8 [O, W], of levels."""
        return pack_bits((levels_OI + self.zero).to(torch.uint8), self.bits)

    def quantised(self, weight_OI: torch.Tensor, dtype: torch.dtype) -> QuantisedWeight:
        """With scales in `dtype`. Without compiled code, one tile of rows at a time is a float32 copy."""
        num_outputs, num_inputs = weight_OI.shape
        codes_OW = weight_OI.new_empty(num_outputs, packed_bytes(num_inputs, self.bits), dtype=torch.uint8)
        scales = []
        for rows in tiles_of(num_outputs, num_inputs):
            tile_OI = readable(weight_OI[rows])
            scale_OG = self.scales(tile_OI, dtype)
            if can_round(tile_OI) and self.bits in (4, 8):
                round_rows(tile_OI, scale_OG, self.group_size, bits=self.bits, codes_OW=codes_OW[rows])
            else:
                codes_OW[rows] = self.codes(self.levels(tile_OI, self.spread(scale_OG, num_inputs)))
            scales.append(scale_OG)
        return QuantisedWeight(
            bits=self.bits,
            codes_OW=codes_OW,
            num_inputs=num_inputs,
            scale=GroupValues(value_OB=torch.cat(scales)),
            group_size=self.group_size,
            zero=self.zero,
        )


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raises BadCheckpoint if the tensor `name` has weights or scales that are not finite."""
    if not torch.isfinite(values).all():
        raise BadCheckpoint(f"{name} has weights that are NaN or infinite: download the checkpoint again")


def fp8_rows(weight_OI: torch.Tensor, dtype: torch.dtype) -> QuantisedWeight:
    """Rounded to e4m3, with a scale for each output: its largest magnitude / 448."""
    num_inputs = weight_OI.shape[1]
    codes_OI, scales = torch.empty_like(weight_OI, dtype=torch.uint8, memory_format=torch.contiguous_format), []
    for rows in tiles_of(*weight_OI.shape):
        tile_OI = readable(weight_OI[rows])
        if can_round(tile_OI):
            largest_O1 = largest_of_groups(tile_OI, num_inputs)
        else:
            largest_O1 = tile_OI.float().abs().amax(dim=1, keepdim=True)
        scale_O1 = (largest_O1 / _LARGEST_FP8).to(dtype)
        scale_O1 = torch.where(scale_O1 == 0, 1.0, scale_O1).to(dtype)
        if can_round(tile_OI):
            round_rows(tile_OI, scale_O1, num_inputs, bits=None, codes_OW=codes_OI[rows])
        else:
            levels = (tile_OI.float() / scale_O1.float()).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
            codes_OI[rows] = levels.to(torch.float8_e4m3fn).view(torch.uint8)
        scales.append(scale_O1)
    return QuantisedWeight(
        bits=8,
        codes_OW=codes_OI,
        num_inputs=num_inputs,
        scale=GroupValues(value_OB=torch.cat(scales)),
        group_size=num_inputs,
        table=fp8_values(weight_OI.device),
    )


def fp8_values(device: torch.device) -> torch.Tensor:
    """float32 [256]: the value of each byte."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def readable(weight_OI: torch.Tensor) -> torch.Tensor:
    """In a type that compiled code reads: itself, or a float32 copy."""
    return weight_OI if weight_OI.dtype in (torch.bfloat16, torch.float32) else weight_OI.float()
