"""Activations of feed-forward layers as a gate. F intermediate size, T tokens."""

from __future__ import annotations

import torch

from workers.kernels.device_kernels import Kernels
from workers.models.families.traits import Activation


def gate(activation: Activation, kernels: Kernels, gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up, [T, F], where the last dimension holds first all of gate, then all of up."""
    if activation == "silu":
        return kernels.silu_mul(gate_up_TF2)
    if activation == "gelu_tanh":
        return kernels.gelu_tanh_mul(gate_up_TF2)
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return kernels.activate(gate_TF, activation) * up_TF
