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
from workers.kernels.cpu.memory import roomy_zeros
from workers.kv.host import FinishedOnload, HostCopies
from workers.kv.storage import KVStorage

_cuda: Any = torch.cuda  # a CPU build of torch has not all of its types

PIECE_BYTES = 32 * 2**20
"""Bytes of blocks that are staged on a GPU at a time: a millisecond or less of its link to the host."""
_NUM_STAGED = 5  # pieces there is memory for: two on their way out, one coming in, and one for each stream's turning
_MAX_UNASKED = 1024  # on a follower, which is not polled
_NUM_PROBED = 64
_NUM_PROBES = 3


def host_copies(storage: KVStorage, num_slots: int) -> HostCopies:
    """Copies for slots as large as a block of this rank. Raises Misconfigured without memory for them. Only rank 0 is
    polled for `loaded` ones."""
    return CudaCopies(storage, num_slots) if storage.device.type == "cuda" else CpuCopies(storage, num_slots)


def staging_bytes(block_bytes: int) -> int:
    """Device memory that the copies of a GPU take, for blocks of this many bytes on a rank."""
    return _NUM_STAGED * _blocks_a_piece(block_bytes) * block_bytes


class CpuCopies:
    """A load is over when `load` returns."""

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self._pairs = [
            (data, roomy_zeros(num_slots, *data.shape[:2], *data.shape[3:], dtype=data.dtype))
            for data in storage.tensors
        ]
        self._loaded: list[FinishedOnload] = []
        self.blocks_per_s = _probed(self, min(num_slots, storage.num_blocks))

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            for data, kept in self._pairs:
                kept[slot].copy_(data[:, :, block_id])

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        begun_s = time.perf_counter()
        for block_id, slot in zip(block_ids, slots, strict=True):
            for data, kept in self._pairs:
                data[:, :, block_id].copy_(kept[slot])
        self._loaded.append(FinishedOnload(load_id=load_id, elapsed_s=time.perf_counter() - begun_s))

    def finished(self) -> Sequence[FinishedOnload]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def await_copy(self, load_id: int) -> None:
        """Rank 0 has returned it from `finished` before: a load ends immediately here."""
        self._loaded = [loaded for loaded in self._loaded if loaded.load_id != load_id]


class CudaCopies:
    """Called on the thread whose current stream computes. For caches whose parts have one shape."""

    def __init__(self, storage: KVStorage, num_slots: int) -> None:
        self._storage = storage
        data = storage.data
        num_parts, run = data.shape[0] * data.shape[1], data[0, 0, 0].numel()
        self._num_staged = _blocks_a_piece(storage.block_bytes)
        self._slots_NPR = _pinned_zeros(num_slots, num_parts, run, dtype=data.dtype)
        staged = (self._num_staged, num_parts, run)
        self._out, self._in = _cuda.Stream(data.device), _cuda.Stream(data.device)
        self._leaving = deque((torch.empty(staged, dtype=data.dtype, device=data.device), _Mark()) for _ in range(2))
        self._coming_NPR = torch.empty(staged, dtype=data.dtype, device=data.device)
        self._turned = [torch.empty(staged, dtype=data.dtype, device=data.device).flatten() for _ in range(2)]
        self._stowed = _Mark()
        self._loads: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._unsettled: dict[int, Any] = {}
        self.blocks_per_s = _probed(self, min(num_slots, storage.num_blocks))

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        compute = _cuda.current_stream()
        for piece, into in self._pieces(block_ids, slots):
            staged_NPR, drained = self._leaving[0]
            self._leaving.rotate()
            drained.hold(compute)
            payload = self._payload(self._turned[0], len(piece))
            self._storage.gather(piece, out=payload)
            staged_NPR[: len(piece)].copy_(self._by_part(payload).transpose(0, 1))
            self._out.wait_stream(compute)
            with _cuda.stream(self._out):
                for index, slot in enumerate(into):
                    self._slots_NPR[slot].copy_(staged_NPR[index], non_blocking=True)
                drained.set(self._out)
        self._stowed.set(self._out)

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._in.wait_stream(_cuda.current_stream())
        self._stowed.hold(self._in)
        begun, done = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        with _cuda.stream(self._in):
            begun.record()
            for piece, origin in self._pieces(block_ids, slots):
                for index, slot in enumerate(origin):
                    self._coming_NPR[index].copy_(self._slots_NPR[slot], non_blocking=True)
                payload = self._payload(self._turned[1], len(piece))
                self._by_part(payload).copy_(self._coming_NPR[: len(piece)].transpose(0, 1))
                self._storage.scatter(piece, payload)
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
        self._storage.touch()

    def _pieces(self, block_ids: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        assert len(block_ids) == len(slots)
        for start in range(0, len(block_ids), self._num_staged):
            stop = start + self._num_staged
            yield block_ids[start:stop], slots[start:stop]

    def _payload(self, room: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """As `KVStorage.gather` gives it, in the beginning of some memory."""
        data = self._storage.data
        shape = (*data.shape[:2], num_blocks, *data.shape[3:])
        return room[: data[:, :, 0].numel() * num_blocks].view(shape)

    def _by_part(self, payload: torch.Tensor) -> torch.Tensor:
        """[P, N, R], a view."""
        return payload.flatten(0, 1).flatten(2)


class _Mark:
    """A place in a stream that another may wait for. Until it is set there is nothing to wait for."""

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
    """torch's own pinned memory comes in powers of two: of 40 GiB it would take 64."""
    zeros = roomy_zeros(*shape, dtype=dtype)
    try:
        cudart = _cuda.cudart()
        _cuda.check_error(int(cudart.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    except RuntimeError as error:
        raise Misconfigured(
            f"{zeros.nbytes / 2**30:.2f} GiB of host memory cannot be pinned for the host tier: {error}; lower "
            f"host_kv_gib, or raise the limit on locked memory (ulimit -l)",
            param="host_kv_gib",
        ) from error
    weakref.finalize(zeros, cudart.cudaHostUnregister, zeros.data_ptr())
    return zeros


def _probed(copies: HostCopies, num_blocks: int) -> float:
    """Blocks a second, of slots and blocks that hold zeros still. The first time memory is touched, and kernels are
    loaded: it does not count."""
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
