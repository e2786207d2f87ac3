"""One rank's half of the host tier: memory for its share of the kept blocks, and the copies to and from the device.

On a CPU both tiers are the same memory: copies are made within the call. On a GPU the host's half is pinned, and::

    compute stream  step n │ gather into staging │ step n + 1 ...        │ waits for the load │ the step that reads
    out stream               waits │ staging ──▶ pinned slots
    in stream       waits for step n, and for what the out stream writes │ pinned ──▶ staging ──▶ scatter

A block is gathered behind the steps that write it, and before any step that overwrites it; a load begins when
steps that had its blocks before are over, and runs beside those that come after. No host waits for any of it.

Legend: N slots or blocks, L layers, P parts of all layers (L * 2), R elements of a run: what a block keeps of one part.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from protos.errors import Misconfigured
from workers.kernels.cpu.regions import roomy_zeros
from workers.kv.host import FinishedOnload, HostCopies
from workers.kv.kv_storage import KVStorage

_cuda: Any = torch.cuda  # a CPU build of torch has not all of its types

PIECE_BYTES = 32 * 2**20
"""Bytes of blocks that are staged on a GPU at a time: a millisecond or less of its link to the host."""
_NUM_LEAVING = 2  # pieces on their way out
_NUM_STAGED = _NUM_LEAVING + 3  # pieces with memory: one more comes in, and one for each stream's layout
_MAX_UNASKED = 1024  # on a follower, which is not polled
_NUM_PROBED = 64
_NUM_PROBES = 3


def host_copies(storage: KVStorage, num_slots: int) -> HostCopies:
    """Allocates slots, each as large as a block of this rank with the KV of a head. Raises Misconfigured if there is
    too little memory. Only rank 0 polls `loaded`."""
    return (CudaCopies if storage.device.type == "cuda" else CpuCopies)(storage, num_slots)


def staging_bytes(*block_bytes: int) -> int:
    """The device memory for copies on a GPU, by the bytes of a block in each storage."""
    return _NUM_STAGED * _blocks_a_piece(sum(block_bytes)) * sum(block_bytes)


def _storages(storage: KVStorage) -> list[KVStorage]:
    return [storage] if storage.beside is None else [storage, storage.beside]


class CpuCopies:
    """A load is over when `load` returns."""

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self._pairs = [
            (data, roomy_zeros(num_slots, *data.shape[:2], *data.shape[3:], dtype=data.dtype))
            for each in _storages(storage)
            for data in each.tensors
        ]
        self._loaded: list[FinishedOnload] = []
        self.blocks_per_s = _probed(self, min(num_slots, storage.num_blocks))

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            for data, slots_of in self._pairs:
                slots_of[slot].copy_(data[:, :, block_id])

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        begun_s = time.perf_counter()
        for block_id, slot in zip(block_ids, slots, strict=True):
            for data, slots_of in self._pairs:
                data[:, :, block_id].copy_(slots_of[slot])
        self._loaded.append(FinishedOnload(load_id=load_id, elapsed_s=time.perf_counter() - begun_s))

    def finished(self) -> Sequence[FinishedOnload]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def await_copy(self, load_id: int) -> None:
        """Rank 0 has returned it from `finished` before: a load ends immediately here."""
        self._loaded = [loaded for loaded in self._loaded if loaded.load_id != load_id]


class CudaCopies:
    """Called on the thread whose current stream computes."""

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self._storages = _storages(storage)
        self._num_staged = _blocks_a_piece(sum(each.block_bytes for each in self._storages))
        self._parts = [
            _TensorCopies(each, data, num_slots, self._num_staged) for each in self._storages for data in each.tensors
        ]
        self._out, self._in = _cuda.Stream(storage.device), _cuda.Stream(storage.device)
        self._leaving = deque((index, _Mark()) for index in range(_NUM_LEAVING))
        self._stowed = _Mark()
        self._loads: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._unsettled: dict[int, Any] = {}
        self.blocks_per_s = _probed(self, min(num_slots, storage.num_blocks))

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        compute = _cuda.current_stream()
        for piece, into in self._pieces(block_ids, slots):
            staged, drained = self._leaving[0]
            self._leaving.rotate()
            drained.hold(compute)
            for part in self._parts:
                part.collect(piece, staged)
            self._out.wait_stream(compute)
            with _cuda.stream(self._out):
                for part in self._parts:
                    part.send(staged, into)
                drained.set(self._out)
        self._stowed.set(self._out)

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._in.wait_stream(_cuda.current_stream())
        self._stowed.hold(self._in)
        begun, done = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        with _cuda.stream(self._in):
            begun.record()
            for piece, origin in self._pieces(block_ids, slots):
                for part in self._parts:
                    part.load(origin, piece)
            done.record()
        self._loads[load_id] = (begun, done)
        self._unsettled[load_id] = done
        while len(self._loads) > _MAX_UNASKED:
            self._loads.popitem(last=False)

    def finished(self) -> Sequence[FinishedOnload]:
        over = []
        for load_id, (begun, done) in self._loads.items():
            if not done.query():
                break
            over.append(FinishedOnload(load_id=load_id, elapsed_s=begun.elapsed_time(done) / 1000))
        for loaded in over:
            del self._loads[loaded.load_id]
        return over

    def await_copy(self, load_id: int) -> None:
        """Later offloads wait as well: slots that were read may be written again."""
        done = self._unsettled.pop(load_id)
        _cuda.current_stream().wait_event(done)
        self._out.wait_event(done)
        for storage in self._storages:
            storage.touch()

    def _pieces(self, block_ids: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        assert len(block_ids) == len(slots)
        for start in range(0, len(block_ids), self._num_staged):
            stop = start + self._num_staged
            yield block_ids[start:stop], slots[start:stop]


class _TensorCopies:
    """Copies of one of the cache's tensors: the pinned slots, and staging memory on the device for `num_staged`
    blocks."""

    def __init__(self, storage: KVStorage, data: torch.Tensor, num_slots: int, num_staged: int) -> None:
        self._storage = storage
        self._data = data
        num_parts, run = data.shape[0] * data.shape[1], data[0, 0, 0].numel()
        self._slots_NPR = _pinned_zeros(num_slots, num_parts, run, dtype=data.dtype)

        def staging() -> torch.Tensor:
            return torch.empty(num_staged, num_parts, run, dtype=data.dtype, device=data.device)

        self._leaving = [staging() for _ in range(_NUM_LEAVING)]
        self._coming_NPR = staging()
        self._turned = [staging().flatten() for _ in range(2)]

    def collect(self, block_ids: Sequence[int], staged: int) -> None:
        payload = self._payload(self._turned[0], len(block_ids))
        self._storage.gather(block_ids, out=payload, of=self._data)
        self._leaving[staged][: len(block_ids)].copy_(self._by_part(payload).transpose(0, 1))

    def send(self, staged: int, slots: Sequence[int]) -> None:
        for index, slot in enumerate(slots):
            self._slots_NPR[slot].copy_(self._leaving[staged][index], non_blocking=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for index, slot in enumerate(slots):
            self._coming_NPR[index].copy_(self._slots_NPR[slot], non_blocking=True)
        payload = self._payload(self._turned[1], len(block_ids))
        self._by_part(payload).copy_(self._coming_NPR[: len(block_ids)].transpose(0, 1))
        self._storage.scatter(block_ids, payload, of=self._data)

    def _payload(self, room: torch.Tensor, num_blocks: int) -> torch.Tensor:
        shape = (*self._data.shape[:2], num_blocks, *self._data.shape[3:])
        return room[: self._data[:, :, 0].numel() * num_blocks].view(shape)

    def _by_part(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.flatten(0, 1).flatten(2)


class _Mark:
    """A place in a stream for which another stream may wait. An unset mark is not waited for."""

    def __init__(self) -> None:
        self._event: Any = None

    def set(self, stream: Any) -> None:
        self._event = _cuda.Event()
        self._event.record(stream)

    def hold(self, stream: Any) -> None:
        if self._event is not None:
            stream.wait_event(self._event)


def _blocks_a_piece(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


def _pinned_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocates pinned memory exactly: torch's own comes in powers of two."""
    zeros = roomy_zeros(*shape, dtype=dtype)
    try:
        cudart = _cuda.cudart()
        _cuda.check_error(int(cudart.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    except RuntimeError as error:
        raise Misconfigured(
            f"{zeros.nbytes / 2**30:.2f} GiB cannot be pinned: {error}; lower host_kv_gib, or raise ulimit -l",
            param="host_kv_gib",
        ) from error
    weakref.finalize(zeros, cudart.cudaHostUnregister, zeros.data_ptr())
    return zeros


def _probed(copies: HostCopies, num_blocks: int) -> float:
    """Measures blocks a second, with zeros in slots and blocks. The first copy touches memory and loads kernels, and is
    not counted."""
    blocks = range(min(num_blocks, _NUM_PROBED))
    speeds = []
    for number in range(-1 - _NUM_PROBES, 0):
        copies.offload(blocks, blocks)
        copies.onload(number, blocks, blocks)
        loaded = _waited(copies)
        copies.await_copy(number)
        speeds.append(len(blocks) / max(loaded.elapsed_s, 1e-9))
    return sorted(speeds[1:])[_NUM_PROBES // 2]


def _waited(copies: HostCopies) -> FinishedOnload:
    while True:
        for loaded in copies.finished():
            return loaded
        time.sleep(0.001)
