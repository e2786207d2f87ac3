"""AWQ "gemm" files by the format's rules: nibble i of a word is output 8 w + [0, 2, 4, 6, 1, 3, 5, 7][i]."""

from __future__ import annotations

import numpy as np
import torch

from tests.numerics.formats.served import Encode, Encoded
from tests.numerics.formats.streams import in_groups

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def interleaved(codes: np.ndarray) -> torch.Tensor:
    """int32 [rows, outputs / 8] of codes [rows, outputs]."""
    eights = codes.reshape(len(codes), -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], dtype=np.uint32)
    for nibble, output in enumerate(ORDER):
        words |= eights[:, :, output] << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def awq(group_size: int = 32) -> Encode:
    def encode(_: str, weight: torch.Tensor) -> Encoded | None:
        w = weight.numpy()
        if w.shape[0] % 8:
            return None
        size = w.shape[1] if group_size == -1 else group_size
        codes, scales, zeros, dequantised = [], [], [], []
        for columns in in_groups(w, size):
            low, high = np.minimum(columns.min(1, keepdims=True), 0), np.maximum(columns.max(1, keepdims=True), 0)
            scale = np.maximum((high - low) / 15, 1e-4).astype(np.float16)
            zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, 15)
            code = np.clip(np.round(columns / scale.astype(np.float32)) + zero, 0, 15)
            codes.append(code)
            scales.append(scale)
            zeros.append(zero)
            dequantised.append(scale.astype(np.float32) * (code - zero).astype(np.float32))
        stored = {
            "qweight": interleaved(np.concatenate(codes, 1).T),
            "qzeros": interleaved(np.concatenate(zeros, 1).T),
            "scales": torch.from_numpy(np.concatenate(scales, 1).T.copy()),
        }
        return stored, torch.from_numpy(np.concatenate(dequantised, 1))

    return encode
