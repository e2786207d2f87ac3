"""Memory for payloads on their way, used again and again: a fresh page costs more than what is copied into it.

stage: take(num_bytes) ──▶ payload ──▶ ... on the wire, or waiting to be landed ... ──▶ give(payload)
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_LEAST_BYTES = 64 * 2**10

_cuda: Any = torch.cuda


class Staging:
    """Buffers of one end of a rank's lanes. Any thread may call. Up to `max_bytes` are kept while they are not used.

    On CUDA they are device memory: the next user of a buffer waits for the work that is still queued on it. Pinned ones
    are of the host, for a GPU to copy; a caller waits for the copies before it gives one back.
    """

    def __init__(self, *, device: str, max_bytes: int, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned and _cuda.is_available()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, Any]] = []  # with the event after which memory may be written
        self._taken: dict[int, torch.Tensor] = {}  # by address
        self.num_free_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes]. The caller owns it until it is given back."""
        with self._lock:
            fitting = [entry for entry in self._free if entry[0].numel() >= num_bytes]
            if fitting:
                buffer, ready = min(fitting, key=lambda entry: entry[0].numel())
                self._free = [entry for entry in self._free if entry[0] is not buffer]
                self.num_free_bytes -= buffer.numel()
            else:
                capacity = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
                buffer = torch.empty(capacity, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
                ready = None
            self._taken[buffer.data_ptr()] = buffer
        if ready is not None:
            ready.synchronize()
        return buffer[:num_bytes]

    def give(self, payload: torch.Tensor) -> None:
        """Returns a buffer from `take`, or a view that starts at its first byte. Ignores other memory."""
        with self._lock:
            buffer = self._taken.pop(payload.data_ptr(), None)
            if buffer is None:
                return
            ready = None
            if buffer.is_cuda:
                ready = _cuda.Event()
                ready.record()
            self._free.append((buffer, ready))
            self.num_free_bytes += buffer.numel()
            while self.num_free_bytes > self._max_bytes:
                smallest = min(self._free, key=lambda entry: entry[0].numel())
                if smallest[1] is not None:
                    smallest[1].synchronize()  # torch's allocator does not track the streams that used the memory
                self._free = [entry for entry in self._free if entry is not smallest]
                self.num_free_bytes -= smallest[0].numel()

    def discard(self, payload: torch.Tensor) -> None:
        """Discards memory from `take` for good: a peer may still write into it."""
        with self._lock:
            self._taken.pop(payload.data_ptr(), None)
