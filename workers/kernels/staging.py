"""Copies of numbers between host and device without waiting: pinned memory, and copies queued on the current stream.

torch reuses pinned memory only after the copy that reads it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_cuda: Any = torch.cuda


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Queues a copy of the array to the device. The host may change the array immediately."""
    return _pinned(array, torch.device(device)).to(device, non_blocking=True)


def overwrite(target: torch.Tensor, array: np.ndarray) -> None:
    """As `to_device`, into an existing tensor of the array's shape."""
    target.copy_(_pinned(array, target.device), non_blocking=True)


class Queued:
    """The work that is queued on a device's current stream now."""

    def __init__(self, device: torch.device | str) -> None:
        self._end: Any = None
        if torch.device(device).type == "cuda":
            self._end = _cuda.Event()
            self._end.record()

    def is_over(self) -> bool:
        return self._end is None or bool(self._end.query())

    def wait(self) -> None:
        if self._end is not None:
            self._end.synchronize()


class Landing:
    """Tensors that are copied from a device to the host, with their values after all work queued before."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._landed = None
        self._tensors = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [_land(tensor) for tensor in tensors]
            self._landed = _cuda.Event()
            self._landed.record()

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors on the host, once the copies have ended."""
        if self._landed is not None:
            self._landed.synchronize()
        return self._tensors


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _land(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
