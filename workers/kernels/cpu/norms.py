"""Kinds of norms and activations, as compiled code numbers them: norms.h."""

from __future__ import annotations

from enum import IntEnum

import torch


class CompiledNorm(IntEnum):
    ROUNDED = 0  # RMS norm, rounded before the weight and after it; the weight has the tensors' type
    WIDE = 1  # RMS norm, rounded after the weight, which is in float32
    CENTRED = 2  # layer norm, rounded after the weight and the bias, which are in float32
    NONE = 3


class CompiledActivation(IntEnum):
    SILU = 0
    GELU_TANH = 1
    RELU2 = 2


ACTIVATIONS = {
    "silu": CompiledActivation.SILU,
    "gelu_tanh": CompiledActivation.GELU_TANH,
    "relu2": CompiledActivation.RELU2,
}
"""By the names of `workers.models.families.traits.Activation`; others are torch's."""


def rms_kind(weight: torch.Tensor, dtype: torch.dtype) -> CompiledNorm | None:
    """The compiled RMS norm for this weight and dtype; None if there is none."""
    if weight.dtype == dtype:
        return CompiledNorm.ROUNDED
    return CompiledNorm.WIDE if weight.dtype == torch.float32 else None
