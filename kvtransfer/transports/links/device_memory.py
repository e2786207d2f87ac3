"""Device memory that another process maps, by CUDA's driver. Its owner frees it once no other process has it mapped.

torch would keep memory that it shares until the other process says that it has done with it, and a process that was
killed never does. Here the other process holds the end of a pipe for as long as it maps the memory: the kernel closes
it, however the process ends. CUDA leaves undefined what happens to memory that is freed while it is mapped.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_GRANULE = 2 * 2**20  # smaller allocations share pages, and so a handle, with others
_WITH_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class _Mapped:
    """Memory as torch takes it over (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def shared(device: str, num_bytes: int) -> tuple[torch.Tensor, bytes, int]:
    """Returns zeros, their handle, and the end of a pipe. The other process needs the pipe with the handle; close it
    here after that."""
    address, handle = ctypes.c_uint64(), _Handle()
    _call(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-num_bytes // _GRANULE) * _GRANULE))
    reading, writing = os.pipe()
    memory_B = _tensor(device, address.value, num_bytes, lambda: _free_later(device, address.value, reading))
    try:
        _call(device, "cuIpcGetMemHandle", ctypes.byref(handle), address)
    except RuntimeError:
        os.close(writing)
        raise
    return memory_B.zero_(), bytes(handle), writing


def mapped(device: str, handle: bytes, num_bytes: int, fd: int) -> torch.Tensor:
    address = ctypes.c_uint64()
    try:
        _call(device, "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _WITH_PEERS)
    except BaseException:
        os.close(fd)
        raise

    def release() -> None:
        _call(device, "cuIpcCloseMemHandle", address)
        os.close(fd)

    return _tensor(device, address.value, num_bytes, release)


def _tensor(device: str, address: int, num_bytes: int, release: Callable[[], None]) -> torch.Tensor:
    memory = _Mapped(address, num_bytes)
    weakref.finalize(memory, release).atexit = False
    return _as_tensor(memory, device)


def _as_tensor(memory: _Mapped, device: str) -> torch.Tensor:
    return torch.as_tensor(memory, device=device)


def _free_later(device: str, address: int, reading: int) -> None:
    def free() -> None:
        os.read(reading, 1)  # returns when no process holds the other end
        os.close(reading)
        _call(device, "cuMemFree_v2", ctypes.c_uint64(address))

    threading.Thread(target=free, name="frees a ring", daemon=True).start()


def _call(device: str, name: str, *arguments: Any) -> None:
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # makes the device's context current on this thread
        status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} returned {status}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
