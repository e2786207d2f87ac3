"""The receiving end of one rank's lanes: what its sources send of a chunk becomes one payload.

Every source rank is a stream of its own, read by a thread of its own. The streams of a lane announce the same chunks in
the same order, but not at the same time: a payload waits until each has brought its piece, or has announced it as void.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvtransfer.reshard import Slice
from kvtransfer.transport import Chunk
from kvtransfer.transports.collective.lane import ClosedIdle, Closing, Lane
from kvtransfer.transports.collective.lane_wire import Header, LaneWire, PayloadCorrupted, WireBroken, checksum
from kvtransfer.transports.links.staging_memory import Staging
from protos.values import KVLayout

_LOOK_S = 0.1


@dataclass(slots=True, eq=False)
class IncomingPayload:
    """A chunk that arrives. `payload` is None until its first piece, and always for a void one."""

    chunk: Chunk
    lane: Lane
    missing: set[int]  # streams that have not begun this payload
    begun_s: float
    num_coming: int
    payload: torch.Tensor | None = None
    void: bool = False
    pieces: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return 0 if self.payload is None else self.payload.nbytes


class Inbox:
    """One lane's streams, guarded by `changed`. For every complete parcel `arrived` is called under it, with the time
    it took, and then `wake`."""

    def __init__(
        self,
        lane: Lane,
        slices: Sequence[Slice],
        layout: KVLayout,
        *,
        changed: threading.Condition,
        staging: Staging,
        max_staged_bytes: int,
        arrived: Callable[[IncomingPayload, float], None],
        wake: Callable[[], None],
    ) -> None:
        self.lane = lane
        self._layout = layout
        self._ranks = [part.source for part in slices]
        self._heads = [part.num_heads for part in slices]
        self._changed = changed
        self._staging = staging
        self._max_staged_bytes = max_staged_bytes
        self._arrived = arrived
        self._wake = wake
        self._coming: dict[Chunk, deque[IncomingPayload]] = {}

    def works(self) -> list[Callable[[LaneWire], None]]:
        return [partial(self._work, stream) for stream in range(len(self._ranks))]

    def clear(self) -> None:
        """The lane is gone: incomplete chunks will never arrive."""
        with self._changed:
            for incoming in self._coming.values():
                for parcel in incoming:
                    self.lane.num_staged_bytes -= parcel.num_bytes
                    if parcel.payload is not None:
                        self._staging.discard(parcel.payload)
            self._coming.clear()

    def _work(self, stream: int, wire: LaneWire) -> None:
        header = wire.receive_header(self._ranks[stream])
        if header.goodbye:
            raise ClosedIdle
        if header.chunk is None:
            if self.lane.idles():
                self._wake()
            return
        parcel = self._parcel(header.chunk, stream)
        if header.void:
            parcel.void = True
        else:
            self._check(header, stream)
            piece = self._piece(parcel, header, stream)
            wire.receive(self._ranks[stream], piece)
            if header.checksum and checksum(piece) != header.checksum:
                raise PayloadCorrupted(f"{header.chunk} from {self.lane.peer} has another checksum than was sent")
            self.lane.moved(piece.nbytes, 0.0)
        with self._changed:
            parcel.num_coming -= 1
            complete = parcel.num_coming == 0
            if complete:
                self._complete(parcel)
        if complete:
            self._wake()

    def _parcel(self, chunk: Chunk, stream: int) -> IncomingPayload:
        """The oldest payload of the chunk that this stream has not begun: the same chunk may be sent twice."""
        with self._changed:
            incoming = self._coming.setdefault(chunk, deque())
            for parcel in incoming:
                if stream in parcel.missing:
                    parcel.missing.discard(stream)
                    return parcel
            num_streams = len(self._ranks)
            parcel = IncomingPayload(
                chunk, self.lane, set(range(num_streams)) - {stream}, time.monotonic(), num_streams
            )
            incoming.append(parcel)
            return parcel

    def _check(self, header: Header, stream: int) -> None:
        assert header.chunk is not None
        share = self._heads[stream] / self._layout.num_kv_heads
        allowed = int(header.chunk.num_blocks * self._layout.block_bytes * share)
        if header.num_bytes > allowed or header.num_elements % self._heads[stream]:
            raise WireBroken(f"{self.lane.peer} announced {header.num_bytes} bytes for blocks of {allowed}")

    def _piece(self, parcel: IncomingPayload, header: Header, stream: int) -> torch.Tensor:
        """The place of the stream's piece. The first stream of a payload waits for room for all of it; one payload
        always has room."""
        per_head = header.num_elements // self._heads[stream]
        with self._changed:
            if parcel.payload is None:
                while not self._changed.wait_for(self._has_room_for(parcel), _LOOK_S):
                    if self.lane.aborted:  # an idle stream that waits for room would not notice
                        raise WireBroken("the lane was closed while a payload waited for room")
                if self.lane.closing.is_set():
                    raise Closing
            if parcel.payload is None:
                num_bytes = per_head * sum(self._heads) * header.dtype.itemsize
                parcel.payload = self._staging.take(num_bytes).view(header.dtype)
                parcel.pieces = list(torch.split(parcel.payload, [per_head * count for count in self._heads]))
                parcel.begun_s = time.monotonic()
                self.lane.num_staged_bytes += num_bytes
                self._changed.notify_all()
            piece = parcel.pieces[stream]
        if piece.numel() != header.num_elements or piece.dtype != header.dtype:
            raise WireBroken(f"the ranks of {self.lane.peer} do not agree on the size of a chunk")
        return piece

    def _has_room_for(self, parcel: IncomingPayload) -> Callable[[], bool]:
        return lambda: (
            self.lane.closing.is_set()
            or parcel.payload is not None
            or self.lane.num_staged_bytes < self._max_staged_bytes
        )

    def _complete(self, parcel: IncomingPayload) -> None:
        incoming = self._coming[parcel.chunk]
        incoming.remove(parcel)
        if not incoming:
            del self._coming[parcel.chunk]
        elapsed_s = time.monotonic() - parcel.begun_s
        self.lane.moved(0, elapsed_s)
        if parcel.void and parcel.payload is not None:
            self.lane.num_staged_bytes -= parcel.num_bytes
            self._staging.give(parcel.payload)
            parcel.payload = None
        self._arrived(parcel, elapsed_s)
