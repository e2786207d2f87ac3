"""The sending end of one rank's lanes: payloads wait in a queue for each lane, whose thread puts them on the wire."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.reshard import Slice, pieces
from kvtransfer.transport import Chunk, Sent
from kvtransfer.transports.collective.lane import ClosedIdle, Closing, Lane
from kvtransfer.transports.collective.lane_wire import Header, LaneWire, Message, WireBroken, checksum
from kvtransfer.transports.links.staging_memory import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPayload:
    """`payload` is None after a cancellation. `ready`: the CUDA event after which it is complete."""

    chunk: Chunk
    payload: torch.Tensor | None
    ready: Any = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.payload is None else self.payload.nbytes


class Outbox:
    """One lane's queue and its thread's work. `changed` guards it and is notified of new payloads."""

    def __init__(
        self, lane: Lane, slices: Sequence[Slice], *, source_tp: int, changed: threading.Condition, staging: Staging,
        config: LaneConfig,
    ) -> None:  # fmt: skip
        self.lane = lane
        self.queue: deque[QueuedPayload] = deque()
        self.on_wire: QueuedPayload | None = None
        self._ranks = [source_tp + part.destination for part in slices]
        self._heads = [len(piece) for piece in pieces(slices)]
        self._piece_of = [pieces(slices).index(part.heads) for part in slices]
        self._announces_void = source_tp > 1
        self._changed = changed
        self._staging = staging
        self._config = config
        self._looked_s = time.monotonic()

    def put(self, queued: QueuedPayload) -> None:
        with self._changed:
            self.queue.append(queued)
            self.lane.num_staged_bytes += queued.num_bytes
            self._changed.notify_all()

    def remove(self, ticket_id: str) -> None:
        with self._changed:
            left: list[QueuedPayload] = []
            for queued in self.queue:
                if queued.chunk.ticket_id != ticket_id or queued.payload is None:
                    left.append(queued)
                    continue
                self.lane.num_staged_bytes -= queued.num_bytes
                self._staging.give(queued.payload)
                if self._announces_void:
                    left.append(QueuedPayload(chunk=queued.chunk, payload=None))
            self.queue = deque(left)

    def clear(self) -> None:
        with self._changed:
            for queued in self.queue:
                if queued.payload is not None:
                    self._staging.give(queued.payload)
            if self.on_wire is not None and self.on_wire.payload is not None:
                self._staging.discard(self.on_wire.payload)
            self.queue.clear()
            self.on_wire = None
            self.lane.num_staged_bytes = 0

    def work(self, wire: LaneWire) -> Sent | None:
        """Sends the next payload, or a beat if there is none for a while."""
        if time.monotonic() - self._looked_s > self._config.heartbeat_s and not self.lane.closing_idle:
            self._looked_s = time.monotonic()
            if self.lane.meeting.moved_on():
                raise WireBroken("another rank has left this lane")
        with self._changed:
            self._changed.wait_for(self._has_something_to_do, self._config.heartbeat_s)
            if self.lane.closing.is_set():
                raise Closing
            closing_idle = self.lane.closing_idle and not self.queue
            self.on_wire = queued = self.queue.popleft() if self.queue else None
        if queued is None:
            wire.send([Message(rank=rank, header=Header(goodbye=closing_idle)) for rank in self._ranks])
            if closing_idle:
                raise ClosedIdle
            return None
        start_s = time.monotonic()
        messages = self._messages(queued)
        wire.send(messages, queued.ready)
        if not self.queue:  # otherwise the next payload is staged meanwhile
            wire.flush()
        ended_s = time.monotonic()
        elapsed_s = ended_s - start_s
        num_bytes = sum(message.header.num_bytes for message in messages)
        self.lane.moved(num_bytes, elapsed_s)
        with self._changed:
            self.on_wire = None
            self.lane.num_staged_bytes -= queued.num_bytes
        if queued.payload is None:
            return None
        self._staging.give(queued.payload)
        return Sent(chunk=queued.chunk, num_bytes=num_bytes, elapsed_s=elapsed_s, ended_s=ended_s)

    def _has_something_to_do(self) -> bool:
        return bool(self.queue) or self.lane.closing_idle or self.lane.closing.is_set()

    def _messages(self, queued: QueuedPayload) -> list[Message]:
        if queued.payload is None:
            void = Header(chunk=queued.chunk, void=True)
            return [Message(rank=rank, header=void) for rank in self._ranks]
        per_head, rest = divmod(queued.payload.numel(), sum(self._heads))
        assert rest == 0, f"{queued.payload.numel()} elements cannot be {sum(self._heads)} heads"
        cut = torch.split(queued.payload, [per_head * count for count in self._heads])
        sums = [0] * len(cut)
        if self._config.checksum:
            if queued.ready is not None:
                queued.ready.synchronize()
            sums = [checksum(piece) for piece in cut]
        return [
            Message(
                rank=rank,
                header=Header(
                    chunk=queued.chunk,
                    dtype=queued.payload.dtype,
                    num_elements=cut[index].numel(),
                    checksum=sums[index],
                ),
                piece=cut[index],
            )
            for rank, index in zip(self._ranks, self._piece_of, strict=True)
        ]
