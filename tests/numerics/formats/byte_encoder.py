"""Weights of one byte by the formats' rules, their activations, and products in float64 as the formats define them."""

from __future__ import annotations

from typing import Any

import torch

from tests.numerics.formats.served import Encode, Encoded

FP8 = torch.float8_e4m3fn
LARGEST = {"int8": 127.0, "fp8": 448.0}


def blocks_of(
    weight: torch.Tensor, strategy: str, block: tuple[int, int]
) -> list[tuple[slice, slice, tuple[int, int]]]:
    """Rows and columns that share a scale, and the place of the scale."""
    rows, columns = weight.shape
    height = {"tensor": rows, "channel": 1, "group": 1, "block": block[0]}[strategy]
    width = {"tensor": columns, "channel": columns, "group": block[1], "block": block[1]}[strategy]
    return [
        (slice(i, i + height), slice(j, j + width), (i // height, j // width))
        for i in range(0, rows, height)
        for j in range(0, columns, width)
    ]


def in_bytes(
    levels: str, strategy: str, *, block: tuple[int, int] = (32, 32), scale_name: str = "weight_scale",
    asymmetric: bool = False, scale_dtype: torch.dtype = torch.float32, **beside: torch.Tensor,
) -> Encode:  # fmt: skip
    """`beside`: further tensors of each layer, such as input_scale."""

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        places = blocks_of(weight, strategy, block)
        shape = [1 + max(place[axis] for *_, place in places) for axis in (0, 1)]
        scales, zeros = torch.zeros(shape, dtype=scale_dtype), torch.zeros(shape, dtype=torch.int8)
        codes, dequantised = torch.zeros_like(weight), torch.zeros_like(weight)
        for rows, columns, place in places:
            part = weight[rows, columns]
            low, high = part.min().clamp(max=0), part.max().clamp(min=0)
            scales[place] = (high - low) / 255 if asymmetric else part.abs().max() / LARGEST[levels]
            scale = scales[place].float()
            if levels == "int8":
                zero = (-128 - low / scale).round().clamp(-128, 127) if asymmetric else torch.tensor(0.0)
                zeros[place] = zero.to(torch.int8)
                codes[rows, columns] = ((part / scale).round() + zero).clamp(-128, 127)
                dequantised[rows, columns] = scale * (codes[rows, columns] - zero)
            else:
                codes[rows, columns] = (part / scale).to(FP8).float()
                dequantised[rows, columns] = scale * codes[rows, columns]
        if strategy == "tensor":
            scales, zeros = scales.reshape(1), zeros.reshape(1)
        stored = {"weight": codes.to(torch.int8 if levels == "int8" else FP8), scale_name: scales}
        if asymmetric:
            stored["weight_zero_point"] = zeros
        return stored | {suffix: tensor.clone() for suffix, tensor in beside.items()}, dequantised

    return encode


def rounded(
    x: torch.Tensor, levels: str, *, group: int | None = None, scale: float | None = None, zero: int = 0
) -> torch.Tensor:
    """Inputs, float64, rounded by their format."""
    x = x.float()
    parts = []
    for part in torch.split(x, group or x.shape[1], dim=1):
        of_part = part.abs().amax(1, keepdim=True) / LARGEST[levels] if scale is None else torch.tensor(scale)
        if levels == "fp8":
            values = (part / of_part).clamp(-448, 448).to(FP8).double()
        else:
            values = ((part / of_part).round() + zero).clamp(-128, 127).double() - zero
        parts.append((values * of_part.double()).nan_to_num(0.0))  # of a row of zeros
    return torch.cat(parts, dim=1)


def round_inputs(oracle: Any, tp: int, levels: str, **reference: Any) -> None:
    """Rounds the inputs of every linear layer of the oracle but the head; with several ranks each rounds its share of a
    layer cut by inputs."""

    def hook(name: str) -> Any:
        parts = tp if name.endswith(("o_proj", "down_proj")) else 1

        def before(_: Any, given: tuple[torch.Tensor]) -> torch.Tensor:
            rows = given[0].flatten(0, -2)
            shares = [rounded(part, levels, **reference) for part in rows.chunk(parts, dim=1)]
            return torch.cat(shares, dim=1).float().view_as(given[0])

        return before

    for name, module in oracle.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(hook(name))
