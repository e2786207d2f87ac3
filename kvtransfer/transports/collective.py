"""Lanes over torch.distributed: one small process group per pair of workers, made on demand, gloo or NCCL alike.

    engine thread    offer ─▶ queue            poll ◀─ events      take ◀─ staged
    lane thread               └▶ send header, payload ══ wire ══▶ receive header, payload ─▶┘

Each lane has a thread at either end, which alone waits for the network. An idle sender says so now and then: that is
how its peer tells idle from hung, and how it finds out itself that nobody listens any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtransfer.config import LaneConfig
from kvtransfer.reshard import require_same_layout
from kvtransfer.transport import Arrived, Chunk, LaneLost, Sent, peer_name
from kvtransfer.transports.lane import Closing, Lane, end_all
from kvtransfer.transports.store import Board
from kvtransfer.transports.wire import Header, Rendezvous, Wire, WireBroken
from protos.errors import TransferFailed
from protos.values import KVLayout, LaneAddress, LaneStats, Ticket

_cuda: Any = torch.cuda


def _nothing() -> None:
    """For an end that nobody waits for."""


class CollectiveTransport:
    """Makes one rank's ends. `rank` counts over the worker's own tensor-parallel ranks, `device` holds its payloads."""

    def __init__(self, *, rank: int = 0, device: str = "cpu", config: LaneConfig | None = None) -> None:
        self.rank = rank
        self.device = device
        self.config = config or LaneConfig()

    def sender(
        self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = _nothing
    ) -> CollectiveSender:
        """`wake` is called from lane threads whenever `poll` has something to say."""
        return CollectiveSender(self, address, layout, wake)

    def receiver(
        self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = _nothing
    ) -> CollectiveReceiver:
        """Rank 0 opens the meeting place if `address.port` is 0; the other ranks are given rank 0's address."""
        return CollectiveReceiver(self, address, layout, wake)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """`ready` is the CUDA event after which the payload is complete."""

    chunk: Chunk
    payload: torch.Tensor
    ready: Any


class _Outgoing:
    """The sending end of one lane."""

    def __init__(self, lane: Lane, config: LaneConfig, changed: threading.Condition) -> None:
        self.lane = lane
        self.queue: deque[_Load] = deque()
        self.on_wire = 0
        self._config = config
        self._changed = changed
        self._looked_s = time.monotonic()

    def put(self, load: _Load) -> None:
        with self._changed:
            self.queue.append(load)
            self.lane.num_staged_bytes += load.payload.nbytes
            self._changed.notify_all()

    def remove(self, ticket_id: str) -> None:
        with self._changed:
            for load in [load for load in self.queue if load.chunk.ticket_id == ticket_id]:
                self.queue.remove(load)
                self.lane.num_staged_bytes -= load.payload.nbytes

    def work(self, wire: Wire) -> Sent | None:
        """Sends the next payload, or a beat if there is none for a while."""
        if time.monotonic() - self._looked_s > self._config.beat_s:
            self._looked_s = time.monotonic()
            if self.lane.meeting.moved_on():
                raise WireBroken("another rank has left this lane")
        with self._changed:
            self._changed.wait_for(lambda: self.queue or self.lane.closing.is_set(), self._config.beat_s)
            if self.lane.closing.is_set():
                raise Closing
            load = self.queue.popleft() if self.queue else None
            self.on_wire = 1 if load else 0
        if load is None:
            wire.send(Header())
            return None
        start_s = time.monotonic()
        wire.send(
            Header(chunk=load.chunk, dtype=load.payload.dtype, shape=tuple(load.payload.shape)),
            load.payload,
            load.ready,
        )
        elapsed_s = time.monotonic() - start_s
        self.lane.moved(load.payload.nbytes, elapsed_s)
        return Sent(chunk=load.chunk, num_bytes=load.payload.nbytes, elapsed_s=elapsed_s)


class CollectiveSender:
    def __init__(
        self, transport: CollectiveTransport, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        self.address = address
        self._transport = transport
        self._layout = layout
        self._wake = wake
        self._changed = threading.Condition(threading.RLock())
        self._lanes: dict[str, _Outgoing] = {}
        self._threads: list[Lane] = []  # of lost lanes too, until they have ended
        self._events: deque[Sent | LaneLost] = deque()

    def open(self, ticket: Ticket) -> None:
        require_same_layout(self.address.worker_id, self._layout, ticket.destination.worker_id, ticket.layout)
        self._lane(ticket.destination)

    def can_offer(self, ticket: Ticket) -> bool:
        with self._changed:
            outgoing = self._lanes.get(peer_name(ticket.destination))
            return outgoing is None or outgoing.lane.num_staged_bytes < self._transport.config.max_staged_bytes

    def offer(self, ticket: Ticket, chunk: Chunk, payload: torch.Tensor) -> None:
        ready = None
        if payload.is_cuda:
            ready = _cuda.Event()
            ready.record()
        with self._changed:
            self._lane(ticket.destination).put(_Load(chunk=chunk, payload=payload.contiguous(), ready=ready))

    def poll(self) -> Sequence[Sent | LaneLost]:
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    def cancel(self, ticket_id: str) -> None:
        with self._changed:
            for outgoing in self._lanes.values():
                outgoing.remove(ticket_id)

    def busy(self) -> bool:
        with self._changed:
            return bool(self._events) or any(outgoing.queue or outgoing.on_wire for outgoing in self._lanes.values())

    def lanes(self) -> Sequence[LaneStats]:
        with self._changed:
            return [outgoing.lane.stats() for outgoing in self._lanes.values()]

    def close(self) -> None:
        with self._changed:
            ending = self._threads
            for lane in ending:
                lane.closing.set()
            self._changed.notify_all()
        end_all(ending)

    def _lane(self, destination: LaneAddress) -> _Outgoing:
        peer = peer_name(destination)
        with self._changed:
            if peer in self._lanes:
                return self._lanes[peer]
            transport = self._transport
            meeting = Rendezvous(
                self.address,
                destination,
                rank=transport.rank,
                tp=self._layout.tp,
                bind_host=self.address.host,
                device=transport.device,
                config=transport.config,
            )
            lane = Lane(peer, meeting, stall_s=transport.config.stall_s, wait_s=transport.config.stall_s)
            self._lanes[peer] = outgoing = _Outgoing(lane, transport.config, self._changed)
            self._threads = [*(other for other in self._threads if not other.ended()), lane]
            lane.start(lambda wire: self._work(outgoing, wire), lambda reason: self._lost(outgoing, reason))
            return outgoing

    def _work(self, outgoing: _Outgoing, wire: Wire) -> None:
        sent = outgoing.work(wire)
        if sent is not None:
            with self._changed:
                outgoing.on_wire = 0
                outgoing.lane.num_staged_bytes -= sent.num_bytes
                self._events.append(sent)
            self._wake()

    def _lost(self, outgoing: _Outgoing, reason: str | None) -> None:
        with self._changed:
            if self._lanes.get(outgoing.lane.peer) is outgoing:
                del self._lanes[outgoing.lane.peer]
            if reason is not None:
                self._events.append(LaneLost(peer=outgoing.lane.peer, reason=reason))
        self._wake()


class CollectiveReceiver:
    def __init__(
        self, transport: CollectiveTransport, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._wake = wake
        self._board = None
        if transport.rank == 0 and address.port == 0:
            self._board = Board(address.host)
            address = LaneAddress(
                worker_id=address.worker_id,
                incarnation=address.incarnation,
                host=address.host,
                port=self._board.port,
            )
        self.address = address
        self._changed = threading.Condition(threading.RLock())
        self._lanes: dict[str, Lane] = {}
        self._threads: list[Lane] = []  # of lost lanes too, until they have ended
        self._events: deque[Arrived | LaneLost] = deque()
        self._staged: dict[Chunk, deque[tuple[Lane, torch.Tensor]]] = {}
        self._unwanted: Counter[Chunk] = Counter()

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        require_same_layout(source.worker_id, source_layout, self.address.worker_id, self._layout)
        peer = peer_name(source)
        with self._changed:
            if peer in self._lanes:
                self._lanes[peer].still_wanted()
                return
            stale = [old for name, old in self._lanes.items() if name.rpartition("#")[0] == source.worker_id]
            transport = self._transport
            meeting = Rendezvous(
                source,
                self.address,
                rank=self._layout.tp + transport.rank,
                tp=self._layout.tp,
                bind_host=self.address.host,
                device=transport.device,
                config=transport.config,
            )
            lane = Lane(peer, meeting, stall_s=transport.config.stall_s, wait_s=transport.config.expect_s)
            self._lanes[peer] = lane
            self._threads = [*(other for other in self._threads if not other.ended()), lane]
            lane.start(lambda wire: self._work(lane, source_layout, wire), lambda reason: self._lost(lane, reason))
        for old in stale:
            old.end()
            self._report(old, f"{source.worker_id} has been restarted")

    def poll(self) -> Sequence[Arrived | LaneLost]:
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    def take(self, chunk: Chunk, timeout_s: float) -> torch.Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: chunk in self._staged, timeout_s):
                raise TransferFailed(
                    f"blocks from {chunk.first_block} of ticket {chunk.ticket_id} did not reach rank "
                    f"{self._transport.rank} within {timeout_s:g} s"
                )
            payload = self._pop(chunk)
        if payload.is_cuda:
            payload.record_stream(_cuda.current_stream())  # it was made on the lane's
        return payload

    def drop(self, chunk: Chunk) -> None:
        with self._changed:
            if chunk in self._staged:
                self._pop(chunk)
            else:
                self._unwanted[chunk] += 1

    def busy(self) -> bool:
        with self._changed:
            return bool(self._events or self._staged)

    def lanes(self) -> Sequence[LaneStats]:
        with self._changed:
            return [lane.stats() for lane in self._lanes.values()]

    def close(self) -> None:
        with self._changed:
            ending = self._threads
            for lane in ending:
                lane.closing.set()
            self._changed.notify_all()
        end_all(ending)
        self._staged.clear()
        if self._board is not None:
            self._board.close()

    def _work(self, lane: Lane, layout: KVLayout, wire: Wire) -> None:
        header = wire.receive_header()
        if header.chunk is None:
            return
        allowed = header.chunk.num_blocks * layout.block_bytes
        if header.num_bytes > allowed:
            raise WireBroken(f"{lane.peer} announced {header.num_bytes} bytes for blocks of {allowed}")
        self._wait_for_room(lane)
        start_s = time.monotonic()
        payload = wire.receive(header)
        elapsed_s = time.monotonic() - start_s
        lane.moved(payload.nbytes, elapsed_s)
        arrived = Arrived(chunk=header.chunk, source=lane.peer, num_bytes=payload.nbytes, elapsed_s=elapsed_s)
        with self._changed:
            if self._unwanted[header.chunk]:
                self._unwanted[header.chunk] -= 1
                if not self._unwanted[header.chunk]:
                    del self._unwanted[header.chunk]
                return
            lane.num_staged_bytes += payload.nbytes
            self._staged.setdefault(header.chunk, deque()).append((lane, payload))
            self._events.append(arrived)
            self._changed.notify_all()
        self._wake()

    def _wait_for_room(self, lane: Lane) -> None:
        """One payload may always come, however large."""
        limit = self._transport.config.max_staged_bytes
        with self._changed:
            self._changed.wait_for(lambda: lane.closing.is_set() or lane.num_staged_bytes < limit)
        if lane.closing.is_set():
            raise Closing

    def _pop(self, chunk: Chunk) -> torch.Tensor:
        waiting = self._staged[chunk]
        lane, payload = waiting.popleft()
        if not waiting:
            del self._staged[chunk]
        lane.num_staged_bytes -= payload.nbytes
        self._changed.notify_all()
        return payload

    def _lost(self, lane: Lane, reason: str | None) -> None:
        if reason is not None:
            self._report(lane, reason)

    def _report(self, lane: Lane, reason: str) -> None:
        """What has arrived stays: it may still be landed."""
        with self._changed:
            if self._lanes.get(lane.peer) is lane:
                del self._lanes[lane.peer]
                self._events.append(LaneLost(peer=lane.peer, reason=reason))
            if not self._lanes:
                self._unwanted.clear()
        self._wake()
