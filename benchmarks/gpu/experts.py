"""A layer of Qwen3-30B-A3B's experts: the bytes are those of the experts that the tokens of a draw touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.gpu.cases import Goal, KernelCase
from benchmarks.gpu.quantised import formats, on_device
from workers.kernels.device_kernels import ExpertWeight
from workers.kernels.experts.grouped_experts import grouped_experts
from workers.kernels.quantised.product_choice import ByteProduct, GroupedProduct, quantised_product
from workers.kernels.silu_mul import silu_mul

SHARE = 0.7
"""Of the floor: the goal."""

Made = tuple[Sequence[ExpertWeight], int]
"""Weights by expert, and the bytes of one."""


def expert_cases(device: str, *, divisor: int = 1) -> Iterator[KernelCase]:
    tiny = divisor > 1
    num_experts, slots = (4, 2) if tiny else (128, 8)
    hidden, width = (128, 128) if tiny else (2048, 768)
    makers: dict[str, Callable[[int, int], Made]] = {
        "": lambda outputs, inputs: _floats(num_experts, outputs, inputs, device),
        ", int4": lambda outputs, inputs: _quantised("W4A16", num_experts, outputs, inputs, device),
        ", fp8 blocks": lambda outputs, inputs: _quantised("FP8 blocks", num_experts, outputs, inputs, device),
        ", int8": lambda outputs, inputs: _quantised("W8A8", num_experts, outputs, inputs, device),
    }
    for name, make in makers.items():
        (gate_up, first_bytes), (down, second_bytes) = make(2 * width, hidden), make(hidden, width)
        layer = grouped_experts(dict(enumerate(gate_up)), dict(enumerate(down)), silu_mul, num_experts=num_experts)
        assert layer is not None
        for tokens in (4,) if tiny else (1, 16, 64, 2048):
            weights_TS, chosen_TS = torch.rand(tokens, num_experts, device=device).topk(slots, dim=1)
            x_TE = torch.randn(tokens, hidden, device=device).to(_dtype(device))
            touched = len(torch.unique(chosen_TS))
            yield KernelCase(
                kernel=f"experts{name}",
                shape=f"{tokens} tokens, {touched} of {num_experts} experts",
                launch=lambda x=x_TE, chosen=chosen_TS, by=weights_TS, layer=layer: layer(x, chosen, by),  # type: ignore[misc]
                num_bytes=touched * (first_bytes + second_bytes) + 3 * x_TE.nbytes,
                num_flops=2 * tokens * slots * 3 * width * hidden,
                goal=Goal(share=SHARE),
            )


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter multiplies bfloat16 wrongly


def _floats(num_experts: int, outputs: int, inputs: int, device: str) -> Made:
    weights = torch.randn(num_experts, outputs, inputs, device=device).to(_dtype(device))
    return list(weights.unbind()), weights[0].nbytes


def _quantised(format_name: str, num_experts: int, outputs: int, inputs: int, device: str) -> Made:
    """Copies of one weight: each is read from memory of its own."""
    made = quantised_product(on_device(formats()[format_name](outputs, inputs), device))
    assert isinstance(made, GroupedProduct | ByteProduct)
    return [_copy(made) for _ in range(num_experts)], made.codes.num_bytes


def _copy(made: GroupedProduct | ByteProduct) -> GroupedProduct | ByteProduct:
    if isinstance(made, ByteProduct):
        codes = replace(made.codes, levels_OI=made.codes.levels_OI.clone(), scale_GO=made.codes.scale_GO.clone())
        return ByteProduct(codes, made.rounding)
    scale = replace(made.codes.scale, values_VO=made.codes.scale.values_VO.clone())
    return GroupedProduct(replace(made.codes, low=made.codes.low.clone(), scale=scale))
