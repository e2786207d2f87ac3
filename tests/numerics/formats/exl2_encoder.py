"""EXL2 files by the format's rules (exllamav2's conversion/adaptivegptq.py): inputs sorted, groups of 8 to 2 bits."""

from __future__ import annotations

import numpy as np
import torch

from tests.numerics.formats.served import Encode, Encoded
from tests.numerics.formats.streams import dense_words


def exl2(mix: tuple[tuple[int, int], ...] = ((6, 32), (4, 32)), *, old: bool = False) -> Encode:
    """`mix` are (bits, inputs) of the groups; the last repeats to the end. `old` stores q_perm instead of q_invperm."""

    def encode(name: str, weight: torch.Tensor) -> Encoded:
        w = weight.numpy()
        num_outputs, num_inputs = w.shape
        padded = np.zeros((num_inputs, -(-num_outputs // 32) * 32), dtype=np.float32)
        padded[:, :num_outputs] = w.T
        perm = np.random.default_rng(len(name)).permutation(num_inputs)  # packed row k is input perm[k]
        groups: list[tuple[int, int]] = []
        rows, words, scales, largest, first = padded[perm], [], [], [], 0
        decoded = np.zeros_like(padded)
        num_rows = 0
        while first < num_inputs:
            bits, size = mix[min(len(groups), len(mix) - 1)]
            part = rows[first : first + size]
            wanted = np.maximum(np.abs(part).max(0) / (2 ** (bits - 1) - 0.5), 1e-6)
            largest.append(np.float16(wanted.max()))
            s = np.clip(np.ceil(np.sqrt(wanted / np.float32(largest[-1]) * 256)), 1, 16)
            scale = (s**2 / 256 * np.float32(largest[-1])).astype(np.float32)
            code = np.clip(np.round(part / scale) + 2 ** (bits - 1), 0, 2**bits - 1).astype(np.int64)
            decoded[first : first + size] = (code - 2 ** (bits - 1)) * scale
            packed = dense_words(code.T, bits).T
            groups.append((bits, num_rows))
            words.append(packed)
            scales.append(s.astype(np.int64) - 1)
            num_rows += len(packed)
            first += size
        dequantised = np.zeros_like(padded)
        dequantised[perm] = decoded
        stored = {
            "q_weight": torch.cat(words),
            "q_scale": dense_words(np.stack(scales), 4),
            "q_scale_max": torch.from_numpy(np.array(largest, dtype=np.float16)),
            "q_groups": torch.tensor(groups, dtype=torch.int16).flatten(),
        }
        inverse = torch.from_numpy(np.argsort(perm).astype(np.int32))
        stored |= {"q_perm": torch.from_numpy(perm.astype(np.int32))} if old else {"q_invperm": inverse}
        return stored, torch.from_numpy(dequantised[:, :num_outputs].T.copy())

    return encode
