"""GPTQ files by the format's rules: w[k, n] = scales[g_idx[k], n] * (q[k, n] - z[g_idx[k], n])."""

from __future__ import annotations

import numpy as np
import torch

from tests.numerics.formats.served import Encode, Encoded
from tests.numerics.formats.streams import dense_words


def gptq(
    bits: int = 4, group_size: int = 32, *, symmetric: bool = False, act_order: bool = False, version: int = 1,
    bare: bool = False,
) -> Encode:  # fmt: skip
    """Round to nearest. `bare` stores no g_idx. A zero of 0 is avoided: version 1 cannot say it."""

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        w = weight.numpy()
        num_outputs, num_inputs = w.shape
        size = num_inputs if group_size == -1 else group_size
        g_idx = np.arange(num_inputs) // size
        if act_order:
            g_idx = np.random.default_rng(num_inputs).permutation(g_idx)
        num_groups = g_idx.max() + 1
        codes = np.zeros((num_outputs, num_inputs), dtype=np.int64)
        scales = np.zeros((num_groups, num_outputs), dtype=np.float16)
        zeros = np.zeros((num_groups, num_outputs), dtype=np.int64)
        for g in range(num_groups):
            columns = w[:, g_idx == g]
            low, high = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
            if symmetric:
                high = np.maximum(high, -low)
                low = -high
            scales[g] = np.maximum((high - low) / (2**bits - 1), 1e-4)
            scale = scales[g].astype(np.float32)
            zeros[g] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / scale), 1, 2**bits - 1)
            codes[:, g_idx == g] = np.clip(np.round(columns / scale[:, None]) + zeros[g][:, None], 0, 2**bits - 1)
        dequantised = scales[g_idx].astype(np.float32).T * (codes - zeros[g_idx].T).astype(np.float32)
        stored = {
            "qweight": dense_words(codes, bits).T,
            "qzeros": dense_words(zeros - (1 if version == 1 else 0), bits),
            "scales": torch.from_numpy(scales),
        }
        if not bare:
            stored["g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
        return stored, torch.from_numpy(dequantised)

    return encode


def gptq_config(bits: int = 4, group_size: int = 32, **others: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": False} | others
