"""The device of this process: what the kernels ask of it, and copies between it and the host without waiting, by pinned
memory and on the current stream.

torch reuses pinned memory only after the copy that reads it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

_cuda: Any = torch.cuda


@cache
def capability() -> int:
    """The compute capability of this process's GPU, without its point: 90 for an H100; 80 if there is no GPU."""
    if not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def takes_large_tiles() -> bool:
    """Cards of 9.0 to 11.x give a program 227 KiB of shared memory. The others are treated as those with the least, 99
    KiB: 8.6, 8.9 and 12.x. Large tiles were measured on an H200."""
    return 90 <= capability() < 120


def has_tensor_memory() -> bool:
    """Products of cards of 10.x and 11.x accumulate in 512 columns of tensor memory. Triton keeps all accumulators of
    a program there, and makes a kernel that traps of one with more; what it copies back passes through shared memory.
    Tiles for these cards were chosen by compiling and have run on none."""
    return 100 <= capability() < 120


def num_multiprocessors(device: torch.device) -> int:
    """1 if kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Queues a copy of the array to the device. The host may change the array immediately."""
    return _pinned(array, torch.device(device)).to(device, non_blocking=True)


def overwrite(target: torch.Tensor, array: np.ndarray) -> None:
    """Copies an array into an existing tensor of its shape, as `to_device` does into a new one."""
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
        if self._landed is not None:
            self._landed.synchronize()
        return self._tensors


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _land(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
