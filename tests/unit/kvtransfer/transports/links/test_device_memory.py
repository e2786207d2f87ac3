"""Device memory that is shared, on a stand-in for CUDA's driver: who frees it, and when."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from kvtransfer.transports.links import device_memory

PATIENCE_S = 60.0
RING_BYTES = 100


class Driver:
    """Counts what is allocated and mapped."""

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self.mapped: set[int] = set()
        self.freed = threading.Event()

    def call(self, device: str, name: str, *arguments: Any) -> None:
        getattr(self, name)(*(getattr(argument, "_obj", argument) for argument in arguments))

    def cuMemAlloc_v2(self, address: ctypes.c_uint64, num_bytes: ctypes.c_size_t) -> None:
        assert num_bytes.value % 2**21 == 0, "it would share its pages with other memory"
        address.value = 2**21 * (1 + len(self.allocated))
        self.allocated.add(address.value)

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> None:
        ctypes.memmove(ctypes.byref(handle), ctypes.byref(address), 8)

    def cuIpcOpenMemHandle_v2(self, address: ctypes.c_uint64, handle: Any, flags: int) -> None:
        ctypes.memmove(ctypes.byref(address), ctypes.byref(handle), 8)
        self.mapped.add(address.value)

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> None:
        self.mapped.remove(address.value)

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> None:
        self.allocated.remove(address.value)
        self.freed.set()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(device_memory, "_call", driver.call)

    def as_tensor(memory: Any, device: str) -> torch.Tensor:
        """Memory of the host that keeps `memory`, as torch does."""
        (num_bytes,) = memory.__cuda_array_interface__["shape"]
        held = (ctypes.c_uint8 * num_bytes)()
        held.memory = memory
        return torch.frombuffer(held, dtype=torch.uint8)

    monkeypatch.setattr(device_memory, "_as_tensor", as_tensor)
    return driver


def test_memory_of_a_killed_peer_is_freed(driver: Driver) -> None:
    memory_B, _, fd = device_memory.shared("cuda", RING_BYTES)
    peer = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[fd])
    os.close(fd)
    del memory_B
    gc.collect()
    assert driver.allocated, "it is mapped still"
    peer.kill()
    peer.wait()
    assert driver.freed.wait(PATIENCE_S)
    assert not driver.allocated


def test_memory_is_freed_after_both_ends_let_go(driver: Driver) -> None:
    memory_B, handle, fd = device_memory.shared("cuda", RING_BYTES)
    theirs_B = device_memory.mapped("cuda", handle, RING_BYTES, fd)
    assert memory_B.numel() == theirs_B.numel() == RING_BYTES
    view_B = theirs_B[10:]
    del memory_B, theirs_B
    gc.collect()
    assert driver.allocated == driver.mapped, "a view is left"
    del view_B
    gc.collect()
    assert driver.freed.wait(PATIENCE_S)
    assert not driver.allocated
    assert not driver.mapped


def test_what_the_driver_refuses_leaves_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> None:
        raise RuntimeError("cuIpcGetMemHandle returned 801")

    monkeypatch.setattr(driver, "cuIpcGetMemHandle", refuse)
    with pytest.raises(RuntimeError, match="801"):
        device_memory.shared("cuda", RING_BYTES)
    gc.collect()
    assert driver.freed.wait(PATIENCE_S)
    assert not driver.allocated
