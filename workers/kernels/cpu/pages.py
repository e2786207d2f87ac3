"""The cache of a layer as the compiled kernels take it (rounded.h).

Legend: NB blocks, K key/value heads, BS positions of a block, D head dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from workers.kernels.cpu.native_build import pointers
from workers.kernels.device_kernels import KVScales

_P, _N = ctypes.c_void_p, ctypes.c_int64
_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class PagedCache(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("keys", "values", "k_scales", "v_scales")),
        ("kind", _N),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of a layer, [NB, K, BS, D], with their scales if they have 8 bits."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None = None

    def described(self) -> PagedCache:
        """Addresses: the tensors must outlive it. All must be contiguous."""
        tensors = pointers(self.keys, self.values, *(self.scales or (None, None)))
        return PagedCache(*tensors, _KINDS.get(self.keys.dtype, 0))

    @property
    def is_contiguous(self) -> bool:
        return all(part.is_contiguous() for part in (self.keys, self.values, *(self.scales or ())))
