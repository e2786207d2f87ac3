"""compressed-tensors' packed integers by the format's rules, and its config."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.numerics.formats.served import Encode, Encoded
from tests.numerics.formats.streams import dense_words


def packed(
    bits: int = 4, group_size: int | None = 32, *, symmetric: bool = True, act_order: bool = False,
    scale_dtype: torch.dtype = torch.float32, one_scale: bool = False,
) -> Encode:  # fmt: skip
    """`group_size` None: one scale a row."""

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        w = weight.numpy()
        num_outputs, num_inputs = w.shape
        half, g_idx = 2 ** (bits - 1), np.arange(num_inputs) // (group_size or num_inputs)
        if act_order:
            g_idx = np.random.default_rng(1).permutation(g_idx)
        num_groups = g_idx.max() + 1
        scales = torch.zeros(num_outputs, num_groups, dtype=scale_dtype)
        zeros, codes = np.zeros((num_outputs, num_groups)), np.zeros_like(w)
        for g in range(num_groups):
            part = w[:, g_idx == g]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            width = (high - low) / (2 * half - 1) if not symmetric else np.abs(part).max(1) / (half - 0.5)
            scales[:, g] = torch.from_numpy(np.full_like(width, width.max()) if one_scale else width)
            scale = scales[:, g].float().numpy()
            if not symmetric:
                zeros[:, g] = np.clip(np.round(-half - low / scale), -half, half - 1)
            codes[:, g_idx == g] = np.clip(np.round(part / scale[:, None]) + zeros[:, g, None], -half, half - 1)
        dequantised = scales.float().numpy()[:, g_idx] * (codes - zeros[:, g_idx]).astype(np.float32)
        stored = {
            "weight_packed": dense_words((codes + half).astype(np.int64), bits),
            "weight_scale": scales.reshape(-1)[:1] if one_scale else scales,
            "weight_shape": torch.tensor([num_outputs, num_inputs]),
        }
        if not symmetric:
            stored["weight_zero_point"] = dense_words((zeros + half).astype(np.int64).T, bits).T
        if act_order:
            stored["weight_g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
        return stored, torch.from_numpy(dequantised)

    return encode


def config_of(
    layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | others


def integers(bits: int, strategy: str, group_size: int | None = None, **others: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, "symmetric": True,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
    } | others  # fmt: skip


def floats(strategy: str, **others: Any) -> dict[str, Any]:
    return integers(8, strategy, type="float") | others
