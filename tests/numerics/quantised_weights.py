"""Random quantised weights of every form that the kernels take."""

from __future__ import annotations

from dataclasses import replace

import torch

from workers.quantization.bit_stream import pack_bits
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight

NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379,
                    0.4407, 0.5626, 0.7230, 1.0])  # fmt: skip
IQ4 = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
MXFP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grouped(bits: int, group_size: int, num_outputs: int, num_inputs: int, **fields: object) -> QuantisedWeight:
    """Symmetric, with a scale of float16 for each group, unless `fields` say otherwise."""
    num_groups = -(-num_inputs // group_size)
    scale_OG = random(num_outputs, num_groups, seed=2).abs().half() * 0.02
    weight = QuantisedWeight(
        bits=bits,
        codes_OW=pack_bits(integers(0, 2**bits, num_outputs, num_inputs, seed=1), bits),
        num_inputs=num_inputs,
        scale=GroupValues(value_OB=scale_OG),
        group_size=group_size,
        zero=2 ** (bits - 1),
    )
    return replace(weight, **fields)  # type: ignore[arg-type]


def with_zeros(bits: int, group_size: int, num_outputs: int, num_inputs: int) -> QuantisedWeight:
    zeros_OG = integers(0, 2**bits, num_outputs, -(-num_inputs // group_size), seed=3)
    return grouped(bits, group_size, num_outputs, num_inputs, zero=zeros_OG)


def two_levels(bits: int, group_size: int, num_outputs: int, num_inputs: int, *, signed: bool) -> QuantisedWeight:
    """Scales of two levels as in the K-quants: with a minimum, or (`signed`) with a zero."""
    per_block = 256 // group_size
    blocks = -(-num_inputs // 256)
    shape = num_outputs, blocks * per_block

    def values(low: int, high: int, seed: int, dtype: torch.dtype) -> GroupValues:
        value_OB = random(num_outputs, blocks, seed=seed).abs().half() * 1e-3
        return GroupValues(value_OB=value_OB, factor_OG=integers(low, high, *shape, seed=seed + 1, dtype=dtype))

    if signed:
        return grouped(bits, group_size, num_outputs, num_inputs, scale=values(-128, 128, 4, torch.int8))
    scale, minimum = values(0, 64, 4, torch.uint8), values(0, 64, 6, torch.uint8)
    return grouped(bits, group_size, num_outputs, num_inputs, scale=scale, minimum=minimum, zero=0)


def per_channel(num_outputs: int, num_inputs: int, **fields: object) -> QuantisedWeight:
    return grouped(8, num_inputs, num_outputs, num_inputs, **fields)


def of_form(form: str, num_outputs: int, num_inputs: int) -> QuantisedWeight:
    size = num_outputs, num_inputs
    match form.split():
        case ["channel"]:
            return per_channel(*size)
        case ["grouped", bits, group]:
            return grouped(int(bits), int(group), *size)
        case ["zeros", bits, group]:
            return with_zeros(int(bits), int(group), *size)
        case ["minimum", bits, group]:
            return two_levels(int(bits), int(group), *size, signed=False)
        case ["factors", bits, group]:
            return two_levels(int(bits), int(group), *size, signed=True)
    raise ValueError(form)
