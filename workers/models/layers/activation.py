"""Activations of feed-forward layers, alone or as a gate. F intermediate size, T tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from workers.kernels.base import Kernels
from workers.models.families.traits import Activation


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


def gate(activation: Activation, kernels: Kernels, gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up, [T, F], where the last dimension holds first all of gate, then all of up."""
    if activation == "silu":
        return kernels.silu_mul(gate_up_TF2)
    if activation == "gelu_tanh":
        return kernels.gelu_tanh_mul(gate_up_TF2)
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_TF) * up_TF
