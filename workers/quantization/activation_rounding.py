"""How a checkpoint rounds the inputs of its quantised products, where it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRounding:
    """Inputs become levels times a scale: of each token (`group` None), of each `group` inputs of a token, or one
    static `scale` with a `zero`. With tensor parallelism a rank scales its own share of a token's inputs.

    A dynamic scale is the largest magnitude / 127 for int8 (compressed-tensors divides by 127.5, vLLM's kernels by 127)
    and / 448 for fp8. Inputs of at least `outliers_from` stay as they are (LLM.int8(): here of each row alone, so that
    an answer does not depend on its batch).
    """

    levels: Literal["int8", "fp8"]
    group: int | None = None
    scale: float | None = None
    zero: int = 0
    outliers_from: float | None = None

    def rounded(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns levels [T, I] and scales [T, 1], or [T, I] for scales of groups, in float32. Their product is the
        input without outliers, whose levels are zero. A token or group with a number that is not finite has the scale
        NaN."""
        x_TI = x_TI.float()
        if self.outliers_from is not None:
            x_TI = torch.where(x_TI.abs() < self.outliers_from, x_TI, 0.0)
        parts = torch.split(x_TI.abs(), self.group or x_TI.shape[1], dim=1)
        scales = [self._scale(part.amax(1, keepdim=True)) for part in parts]
        scale = scales[0]
        if self.group is not None:
            scale = torch.cat([scale.expand_as(part) for scale, part in zip(scales, parts, strict=True)], dim=1)
        return self._levels((x_TI / scale).nan_to_num(0.0)), scale

    def outliers(self, x_TI: torch.Tensor) -> torch.Tensor | None:
        """Returns unrounded inputs, zero elsewhere; None without any. On a GPU the host does not look at values, which
        a CUDA graph could not record."""
        if self.outliers_from is None:
            return None
        outliers = torch.where(x_TI.abs() >= self.outliers_from, x_TI, 0.0)
        return outliers if outliers.device.type != "cpu" or bool(outliers.any()) else None

    def _scale(self, largest: torch.Tensor) -> torch.Tensor:
        scale = largest / torch.full_like(largest, _LARGEST[self.levels])  # by a number CUDA multiplies by its inverse
        scale = torch.where(scale > 0, scale, 1.0) if self.scale is None else torch.full_like(scale, self.scale)
        return torch.where(largest.isfinite(), scale, torch.nan)

    def _levels(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.levels == "fp8":
            return x_TI.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
        least = -128 if self.scale is not None else -127
        return (x_TI.round() + self.zero).clamp(least, 127) - self.zero
