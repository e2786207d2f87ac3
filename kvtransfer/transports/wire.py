"""One lane's process groups: how its ranks meet, and how a header and a payload go from one to another.

    source ranks 0 .. tp-1, destination ranks tp .. 2 tp-1, meeting at the destination's board under

        <source peer>><destination peer>/epoch     an integer; whoever leaves a lane moves it on
        <source peer>><destination peer>/<epoch>/  here/<rank> of everybody who has come, then the groups' own keys

Peer names hold the incarnation, so a restarted worker never meets an old group; the epoch does the same for a lane that
broke between two living workers. Headers go over gloo on every device, payloads over NCCL on CUDA: an idle GPU lane
keeps no kernel spinning.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from kvtransfer.config import LaneConfig
from kvtransfer.transport import MAX_TICKET_ID_BYTES, Chunk, peer_name
from kvtransfer.transports.links import Links, Meeting, open_collective
from kvtransfer.transports.store import BoardStore
from protos.values import LaneAddress

_MAGIC = 0x4241544F4E4B5631  # "BATONKV1"
_MAX_DIMS = 8
_HEADER = struct.Struct(f"<Q6I{_MAX_DIMS}QI{MAX_TICKET_ID_BYTES}s")
_BEAT = 0
_CHUNK = 1
_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
_HEADER_TAG = 1
_PAYLOAD_TAG = 2
_SEVER_TAG = 3
_LONGEST_POLL_S = 0.02
_GPU_POLL_S = 0.0002

_cuda: Any = torch.cuda  # a CPU build of torch has not all of its types


class WireBroken(Exception):
    """The lane cannot be used any more. The message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Announces a payload; without a chunk it only says that the sender is alive."""

    chunk: Chunk | None = None
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize if self.chunk else 0

    def pack(self) -> torch.Tensor:
        """uint8 of always the same length."""
        chunk = self.chunk or Chunk(ticket_id="", generation=0, first_block=0, num_blocks=0)
        ticket_id = chunk.ticket_id.encode()
        assert len(ticket_id) <= MAX_TICKET_ID_BYTES, "reserve() refuses longer ids"
        assert len(self.shape) <= _MAX_DIMS, f"{len(self.shape)} dimensions do not fit a header"
        packed = _HEADER.pack(
            _MAGIC,
            _CHUNK if self.chunk else _BEAT,
            chunk.generation,
            chunk.first_block,
            chunk.num_blocks,
            _DTYPES.index(self.dtype),
            len(self.shape),
            *self.shape,
            *(0,) * (_MAX_DIMS - len(self.shape)),
            len(ticket_id),
            ticket_id,
        )
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Header:
        """Raises WireBroken for anything that `pack` did not make."""
        magic, kind, generation, first, count, dtype, num_dims, *rest = _HEADER.unpack(packed.numpy().tobytes())
        if magic != _MAGIC or kind not in (_BEAT, _CHUNK) or dtype >= len(_DTYPES) or num_dims > _MAX_DIMS:
            raise WireBroken("the peer speaks another protocol: run the same version of Baton on both")
        if kind == _BEAT:
            return cls()
        length, ticket_id = rest[_MAX_DIMS:]
        chunk = Chunk(ticket_id=ticket_id[:length].decode(), generation=generation, first_block=first, num_blocks=count)
        return cls(chunk=chunk, dtype=_DTYPES[dtype], shape=tuple(rest[:num_dims]))


class Wire:
    """A header or a payload at a time, from or to one peer rank. Raises WireBroken; all waits end after `stall_s`.

    One thread uses it; `sever` may be called from any other.
    """

    def __init__(self, links: Links, store: BoardStore, *, peer_rank: int, device: str, config: LaneConfig) -> None:
        self.transport = links.transport
        self._control = links.control
        self._payloads = links.payloads
        self._store = store  # the groups hold only torch's half of it
        self._peer_rank = peer_rank
        self._device = device
        self._stall = timedelta(seconds=config.stall_s)
        self._config = config
        self._stream = _cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self._severed = False

    def send(self, header: Header, payload: torch.Tensor | None = None, ready: Any = None) -> None:
        """Returns when the payload's memory may be reused. `ready` is the CUDA event after which it is complete."""
        self._move(self._control.send, [header.pack()], _HEADER_TAG)
        if payload is None:
            return
        if self._stream is None:
            self._move(self._payloads.send, self._parts(payload), _PAYLOAD_TAG)
            return
        with _cuda.stream(self._stream):
            self._stream.wait_event(ready)
            payload.record_stream(self._stream)
            self._move(self._payloads.send, self._parts(payload), _PAYLOAD_TAG)
            self._wait_for_stream()

    def receive_header(self) -> Header:
        packed = torch.empty(_HEADER.size, dtype=torch.uint8)
        self._move(self._control.recv, [packed], _HEADER_TAG)
        return Header.unpack(packed)

    def receive(self, header: Header) -> torch.Tensor:
        """The payload that the header announced, complete, on this rank's device."""
        if self._stream is None:
            payload = torch.empty(header.shape, dtype=header.dtype)
            self._move(self._payloads.recv, self._parts(payload), _PAYLOAD_TAG)
            return payload
        with _cuda.stream(self._stream):
            payload = torch.empty(header.shape, dtype=header.dtype, device=self._device)
            self._move(self._payloads.recv, self._parts(payload), _PAYLOAD_TAG)
            self._wait_for_stream()
        return payload

    def sever(self) -> None:
        """Makes whatever waits on this wire fail now. gloo has no abort: but an operation that times out closes its
        context's connections, and that is heard by all who wait on them, on both sides."""
        self._severed = True
        with contextlib.suppress(RuntimeError):  # as intended, or it was broken before
            never = self._control.recv([torch.empty(1, dtype=torch.uint8)], self._peer_rank, _SEVER_TAG)
            never.wait(timedelta(milliseconds=1))
        if self._payloads is not self._control:
            self._payloads.abort()

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(payload.view(-1).view(torch.uint8), self._config.message_bytes)

    def _move(self, operation: Any, parts: Sequence[torch.Tensor], tag: int) -> None:
        """All parts are under way before the first is waited for."""
        try:
            for work in [operation([part], self._peer_rank, tag) for part in parts]:
                work.wait(self._stall)
        except RuntimeError as error:
            raise WireBroken(_first_line(error)) from error

    def _wait_for_stream(self) -> None:
        """NCCL notices no dead peer by itself: wait with an eye on the clock, then give the communicator up."""
        assert self._stream is not None
        done = _cuda.Event()
        done.record(self._stream)
        deadline_s = time.monotonic() + self._config.stall_s
        while not done.query():
            if self._severed or time.monotonic() > deadline_s:
                self._payloads.abort()
                raise WireBroken(f"the transfer did not end within {self._config.stall_s:g} s")
            time.sleep(_GPU_POLL_S)


class Rendezvous:
    """Where the ranks of one lane meet, again and again if need be. `rank` counts over both workers."""

    def __init__(
        self,
        source: LaneAddress,
        destination: LaneAddress,
        *,
        rank: int,
        tp: int,
        bind_host: str,
        device: str,
        config: LaneConfig,
    ) -> None:
        self._meeting_place = (destination.host, destination.port)
        self._name = f"{peer_name(source)}>{peer_name(destination)}"
        self._rank = rank
        self._size = 2 * tp
        self._peer_rank = (rank + tp) % self._size
        self._bind_host = bind_host
        self._device = device
        self._config = config
        self._store: BoardStore | None = None
        self._epoch = 0

    def meet(self, keep_waiting: Callable[[float], None]) -> Wire:
        """Waits until every rank of both workers is here. `keep_waiting(seconds)` sleeps, or raises to end the wait."""
        try:
            self._store = store = self._connect()
            poll_s = 0.001
            self._come()
            while not store.check([f"{self._epoch}/here/{rank}" for rank in range(self._size)]):
                keep_waiting(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
                if self.moved_on():
                    self._come()
            return self._wire(store)
        except (OSError, RuntimeError) as error:
            raise WireBroken(f"no lane could be opened: {_first_line(error)}") from error

    def moved_on(self) -> bool:
        """Has some rank of this lane left it? Raises WireBroken when the destination's board is gone."""
        assert self._store is not None
        return self._read_epoch(self._store) != self._epoch

    def leave(self) -> None:
        """Tells all ranks of this lane that they should meet anew."""
        if self._store is None:
            return
        with contextlib.suppress(OSError):  # the destination and its board are gone: its next life starts afresh
            self._store.raise_to("epoch", self._epoch + 1)
            self._store.forget(f"{self._epoch}/")
        self._store.close()
        self._store = None

    def _connect(self) -> BoardStore:
        host, port = self._meeting_place
        return BoardStore(host, port, f"{self._name}/", wait_s=self._config.stall_s)

    def _come(self) -> None:
        assert self._store is not None
        self._epoch = self._read_epoch(self._store)
        self._store.set(f"{self._epoch}/here/{self._rank}", "1")

    def _read_epoch(self, store: BoardStore) -> int:
        try:
            return store.add("epoch", 0)
        except OSError as error:
            raise WireBroken(f"the board of the destination is gone: {error}") from error

    def _wire(self, store: BoardStore) -> Wire:
        links = open_collective(
            Meeting(
                store=store,
                epoch=self._epoch,
                rank=self._rank,
                size=self._size,
                peer_ranks=(self._peer_rank,),
                bind_host=self._bind_host,
                device=self._device,
                config=self._config,
            )
        )
        return Wire(links, store, peer_rank=self._peer_rank, device=self._device, config=self._config)


def _first_line(error: Exception) -> str:
    """gloo and c10d put a stack trace, or a path of their build machine, around what matters."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2] if line.startswith("[") else line
