"""One lane's process groups: how its ranks meet, and how a header and a payload go from one to another.

    source ranks 0 .. m-1, destination ranks m .. m+n-1, meeting at the destination's rendezvous server under

        <source peer>><destination peer>/epoch     an integer; a rank that leaves a lane raises it
        <source peer>><destination peer>/<epoch>/  here/<rank> of each rank that has come, then the groups' own keys;
                                                   gone: a rank that was here and closed its connection

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
import xxhash

from kvtransfer.transport import MAX_TICKET_ID_BYTES, Chunk, peer_name
from kvtransfer.transports.links.choice import open_links
from kvtransfer.transports.links.links import HEADER_TAG, PAYLOAD_TAG, LaneRank, Links, Meeting
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousStore
from protos.values import LaneAddress

_MAGIC = 0x4241544F4E4B5632  # "BATONKV2"
_HEADER = struct.Struct(f"<Q8IQI{MAX_TICKET_ID_BYTES}s")
_ALL_LAYERS = 2**32 - 1
_GROUP_SHIFT = 8  # a chunk's group is above its dtype, where earlier versions had nothing
_BEAT = 0
_CHUNK = 1
_VOID = 2
_GOODBYE = 3
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
_LONGEST_POLL_S = 0.02

_cuda: Any = torch.cuda  # a CPU build of torch has not all of its types


class WireBroken(Exception):
    """The lane cannot be used any more. The message is the reason, in one line."""


class WireStuck(WireBroken):
    """No progress for too long, although all connections are open."""


class PayloadCorrupted(WireBroken):
    """A payload has not come as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Announces a piece of a chunk's payload, or (void) that it will not come. Without a chunk it is a heartbeat, or a
    goodbye, the last message. `checksum`: the piece's, 0 for none."""

    chunk: Chunk | None = None
    dtype: torch.dtype = torch.uint8
    num_elements: int = 0
    void: bool = False
    goodbye: bool = False
    checksum: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def pack(self) -> torch.Tensor:
        """uint8 of always the same length."""
        chunk = self.chunk or Chunk(ticket_id="", generation=0, first_block=0, num_blocks=0)
        ticket_id = chunk.ticket_id.encode()
        assert len(ticket_id) <= MAX_TICKET_ID_BYTES, "reserve() refuses longer ids"
        packed = _HEADER.pack(
            _MAGIC,
            self._kind(),
            chunk.generation,
            chunk.first_block,
            chunk.num_blocks,
            chunk.first_layer,
            _ALL_LAYERS if chunk.num_layers is None else chunk.num_layers,
            _DTYPES.index(self.dtype) | chunk.group << _GROUP_SHIFT,
            self.checksum,
            self.num_elements,
            len(ticket_id),
            ticket_id,
        )
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _kind(self) -> int:
        if self.chunk is None:
            return _GOODBYE if self.goodbye else _BEAT
        return _VOID if self.void else _CHUNK

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Header:
        """Raises WireBroken for anything that `pack` did not make."""
        magic, kind, *numbers, num_elements, length, ticket_id = _HEADER.unpack(packed.numpy().tobytes())
        generation, first_block, num_blocks, first_layer, num_layers, dtype, checksum = numbers
        group, dtype = dtype >> _GROUP_SHIFT, dtype % (1 << _GROUP_SHIFT)
        if magic != _MAGIC or kind not in (_BEAT, _CHUNK, _VOID, _GOODBYE) or dtype >= len(_DTYPES):
            raise WireBroken("the peer speaks another protocol: run the same version of Baton on both")
        if kind in (_BEAT, _GOODBYE):
            return cls(goodbye=kind == _GOODBYE)
        chunk = Chunk(
            ticket_id=ticket_id[:length].decode(),
            generation=generation,
            first_block=first_block,
            num_blocks=num_blocks,
            first_layer=first_layer,
            num_layers=None if num_layers == _ALL_LAYERS else num_layers,
            group=group,
        )
        return cls(chunk=chunk, dtype=_DTYPES[dtype], num_elements=num_elements, void=kind == _VOID, checksum=checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A header for one rank of the lane, with its piece, if any."""

    rank: int
    header: Header
    piece: torch.Tensor | None = None


class LaneWire:
    """Moves headers and pieces to or from the peers, by their rank in the lane. Raises WireBroken; all waits end after
    `stall_s`.

    One thread sends; each peer is received from by a thread of its own; `abort` may be called from any."""

    def __init__(self, links: Links, store: RendezvousStore, at: LaneRank) -> None:
        self.transport = links.transport
        self.why = links.why
        self._links = links
        self._control = links.control
        self._payloads = links.payloads
        self._store = store  # the groups hold only torch's half of it
        self._peer_ranks = at.peer_ranks
        self._stall = timedelta(seconds=at.config.stall_s)
        self._config = at.config
        self._streams = {rank: _cuda.Stream(at.device) for rank in at.peer_ranks} if at.on_gpu else {}
        self._severed = False

    def send(self, messages: Sequence[Message], ready: Any = None) -> None:
        """Returns when the pieces' memory may be reused. `ready` is the CUDA event after which they are complete."""
        works = [
            self._start(self._control.send, message.header.pack(), message.rank, HEADER_TAG) for message in messages
        ]
        pieces = [(message.rank, message.piece) for message in messages if message.piece is not None]
        if not self._streams or not pieces:
            works += [work for rank, piece in pieces for work in self._start_parts(self._payloads.send, piece, rank)]
            self._wait(works)
            return
        self._wait(works)
        stream = self._streams[self._peer_ranks[0]]
        with _cuda.stream(stream):
            stream.wait_event(ready)
            self._wait([work for rank, piece in pieces for work in self._start_parts(self._payloads.send, piece, rank)])

    def receive_header(self, rank: int) -> Header:
        packed = torch.empty(_HEADER.size, dtype=torch.uint8)
        self._wait([self._start(self._control.recv, packed, rank, HEADER_TAG)])
        return Header.unpack(packed)

    def receive(self, rank: int, piece: torch.Tensor) -> None:
        """Fills `piece` with the data that the rank's last header announced; complete when this returns."""
        if not self._streams:
            self._wait(self._start_parts(self._payloads.recv, piece, rank))
            return
        with _cuda.stream(self._streams[rank]):
            self._wait(self._start_parts(self._payloads.recv, piece, rank))

    def abort(self) -> None:
        """Makes every wait on this wire fail now, at both ends. Callable from any thread."""
        self._severed = True
        self._links.abort()

    def close(self) -> None:
        self._links.close()

    def _start_parts(self, operation: Any, piece: torch.Tensor, rank: int) -> list[Any]:
        parts = torch.split(piece.view(torch.uint8), self._config.message_bytes)
        return [self._start(operation, part, rank, PAYLOAD_TAG) for part in parts]

    def _start(self, operation: Any, part: torch.Tensor, rank: int, tag: int) -> Any:
        try:
            return operation([part], rank, tag)
        except RuntimeError as error:
            raise WireBroken(_first_line(error)) from error

    def flush(self) -> None:
        self._bounded(self._links.flush)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            self._bounded(work.wait)

    def _bounded(self, wait: Callable[[timedelta], object]) -> None:
        begun_s = time.monotonic()
        try:
            wait(self._stall)
        except RuntimeError as error:
            waited = not self._severed and time.monotonic() - begun_s >= self._config.stall_s
            raise (WireStuck if waited else WireBroken)(_first_line(error)) from error


class Rendezvous:
    """Where all ranks of both workers meet, again and again if need be."""

    def __init__(self, source: LaneAddress, destination: LaneAddress, at: LaneRank) -> None:
        self._destination = destination
        self._name = f"{peer_name(source)}>{peer_name(destination)}"
        self._at = at
        self._store: RendezvousStore | None = None
        self._epoch = 0

    def connect(self, keep_waiting: Callable[[float], None]) -> LaneWire:
        """Waits until every rank of both workers is here. `keep_waiting(seconds)` sleeps, or raises to end the wait."""
        try:
            self._store = store = self._connect()
            poll_s = 0.001
            self._come()
            while not store.check([f"{self._epoch}/here/{rank}" for rank in range(self._at.size)]):
                keep_waiting(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
                self._require_all()
                if self.moved_on():
                    self._come()
            store.look = self._require_unmoved
            links = open_links(Meeting(at=self._at, store=store, epoch=self._epoch))
            store.look = None
            return LaneWire(links, store, self._at)
        except (OSError, RuntimeError) as error:
            raise _broken("no lane could be opened", error) from error

    def _require_all(self) -> None:
        """Raises WireBroken when a process has died that had come."""
        assert self._store is not None
        if self._store.check([gone := f"{self._epoch}/gone"]):
            raise WireBroken(f"{self._store.get(gone).decode()} hung up while the lane was opened")

    def _require_unmoved(self) -> None:
        self._require_all()
        if self.moved_on():
            raise WireBroken("another rank closed this lane while it was opened")

    def moved_on(self) -> bool:
        """Whether a rank of this lane has left it. Raises WireBroken if the destination's rendezvous server is gone."""
        assert self._store is not None
        return self._read_epoch(self._store) != self._epoch

    def close(self) -> None:
        """Raises the lane's epoch: all of its ranks connect again."""
        if self._store is None:
            return
        with contextlib.suppress(OSError):  # the destination and its server are gone: its next life starts afresh
            self._store.set_on_disconnect("", "")
            self._store.raise_to("epoch", self._epoch + 1)
            self._store.delete(f"{self._epoch - 1}/")  # ranks of this wire may still read published values
        self._store.close()
        self._store = None

    def _connect(self) -> RendezvousStore:
        at = self._destination
        return RendezvousStore(at.host, at.port, f"{self._name}/", key=at.key.encode(), wait_s=self._at.config.stall_s)

    def _come(self) -> None:
        assert self._store is not None
        self._epoch = self._read_epoch(self._store)
        self._store.set_on_disconnect(f"{self._epoch}/gone", f"rank {self._at.rank} of {self._at.size}")
        self._store.set(f"{self._epoch}/here/{self._at.rank}", "1")

    def _read_epoch(self, store: RendezvousStore) -> int:
        try:
            return store.add("epoch", 0)
        except OSError as error:
            raise _broken("the destination's rendezvous server is gone", error) from error


def _broken(what: str, error: Exception) -> WireBroken:
    """A rank that does not answer in time may answer later."""
    return (WireStuck if isinstance(error, TimeoutError) else WireBroken)(f"{what}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """The first telling line of an error: gloo and c10d add stack traces and paths of their build machine."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2] if line.startswith("[") else line


def checksum(piece: torch.Tensor) -> int:
    """A checksum of 32 bits, never 0. On CUDA they are copied to the host first, which costs more than sending them."""
    data = piece.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF or 1
