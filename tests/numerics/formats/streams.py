"""Dense little-endian streams of bits by numpy's own functions: nothing here is the product's."""

from __future__ import annotations

import numpy as np
import torch


def dense_words(values: np.ndarray, bits: int) -> torch.Tensor:
    """int32 [rows, words] of values [rows, n], value i at bit i * bits of its row."""
    planes = np.stack([(values >> bit) & 1 for bit in range(bits)], axis=-1).astype(np.uint8)
    stream = planes.reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def in_groups(values: np.ndarray, group_size: int) -> list[np.ndarray]:
    """Columns [rows, up to group_size] of each group."""
    return [values[:, start : start + group_size] for start in range(0, values.shape[1], group_size)]
