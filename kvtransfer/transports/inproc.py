"""Lanes inside one process, by reference: for tests and simulators, which decide when a payload arrives.

InprocSender.offer ──▶ InprocExchange: carry(parcel, deliver) ── deliver() ──▶ InprocReceiver"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvtransfer.reshard import require_compatible
from kvtransfer.transport import Arrived, Chunk, LaneLost, Presence, Sent, peer_name
from protos.errors import TransferFailed
from protos.values import KVLayout, LaneAddress, LaneLoad, LaneStats, Ticket

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InprocParcel:
    """A payload on its way; `source` and `destination` are peer names."""

    source: str
    destination: str
    chunk: Chunk
    payload: Any
    num_bytes: int
    offered_s: float


Carry = Callable[[InprocParcel, Callable[[], None]], None]


class InprocExchange:
    """Where the ends of one process meet. `carry` is called for each parcel, and delivers it: now, later or never.

    `max_staged_bytes` bounds what may be under way on one lane. A lane carries one parcel after the other: by `clock`,
    each takes from when it was offered, or the one before it was over, until it is delivered.
    """

    def __init__(
        self,
        carry: Carry = lambda parcel, deliver: deliver(),
        *,
        max_staged_bytes: int = 256 * 2**20,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.carry = carry
        self.clock = clock
        self.max_staged_bytes = max_staged_bytes
        self._lock = threading.RLock()
        self._senders: dict[str, InprocSender] = {}
        self._receivers: dict[str, InprocReceiver] = {}

    def sender(
        self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = lambda: None
    ) -> InprocSender:
        sender = InprocSender(self, address, layout, wake)
        self._senders[peer_name(address)] = sender
        return sender

    def receiver(
        self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = lambda: None
    ) -> InprocReceiver:
        receiver = InprocReceiver(self, address, layout, wake)
        self._receivers[peer_name(address)] = receiver
        return receiver

    def cut(
        self,
        source: LaneAddress,
        destination: LaneAddress,
        reason: str,
        cause: type[TransferFailed] = TransferFailed,
    ) -> None:
        """Ends the lane between two peers as a cut wire would: both get LaneLost, the destination with `cause`, and
        payloads under way are lost."""
        with self._lock:
            source_name, destination_name = peer_name(source), peer_name(destination)
            if source_name in self._senders:
                self._senders[source_name]._lose(destination_name, reason)
            if destination_name in self._receivers:
                self._receivers[destination_name]._lose(source_name, reason, cause)

    def _leave(self, end: InprocSender | InprocReceiver) -> None:
        ends: dict[str, Any] = self._senders if isinstance(end, InprocSender) else self._receivers
        ends.pop(peer_name(end.address), None)


@dataclass(slots=True, eq=False)
class _Lane:
    """One end's view of a lane. Its parcels end with it."""

    peer: str
    num_staged_bytes: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    over_s: float = -math.inf  # the last parcel
    lost: bool = False
    cached_stats: LaneStats | None = None

    def moved(self, num_bytes: int, elapsed_s: float) -> None:
        self.num_bytes += num_bytes
        self.busy_s += elapsed_s
        self.cached_stats = None

    def stats(self) -> LaneStats:
        if self.cached_stats is None:
            self.cached_stats = LaneStats(
                peer=self.peer,
                transport="inproc",
                state="open",
                num_bytes=self.num_bytes,
                busy_s=self.busy_s,
                idle_s=0.0,
            )
        return self.cached_stats


class _InprocEnd(Generic[Event]):
    """The part that both ends share."""

    def __init__(
        self, exchange: InprocExchange, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        self.address = address
        self._exchange = exchange
        self._layout = layout
        self._wake = wake
        self._lanes: dict[str, _Lane] = {}
        self._events: deque[Event] = deque()

    def poll(self) -> Sequence[Event]:
        with self._exchange._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def has_news(self) -> bool:
        """Is there anything that was not polled?"""
        return bool(self._events)

    def lanes(self) -> Sequence[LaneStats]:
        return [lane.stats() for lane in self._lanes.values()]

    def lane_loads(self) -> Sequence[LaneLoad]:
        return [LaneLoad(transport="inproc", num_open=len(self._lanes))]


class InprocSender(_InprocEnd[Sent | LaneLost]):
    def __init__(
        self, exchange: InprocExchange, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        super().__init__(exchange, address, layout, wake)
        self._name = peer_name(address)
        self._under_way: list[InprocParcel] = []

    def open(self, ticket: Ticket) -> None:
        destination = ticket.destination
        require_compatible(self.address.worker_id, self._layout, destination.worker_id, ticket.layout)
        with self._exchange._lock:
            self._lane(peer_name(destination))

    def can_offer(self, ticket: Ticket) -> bool:
        lane = self._lanes.get(peer_name(ticket.destination))
        return lane is None or lane.num_staged_bytes < self._exchange.max_staged_bytes

    def stage(self, num_bytes: int) -> Any:
        return bytearray(num_bytes)

    def offer(self, ticket: Ticket, chunk: Chunk, payload: Any) -> None:
        with self._exchange._lock:
            lane = self._lane(peer_name(ticket.destination))
            parcel = InprocParcel(
                source=self._name,
                destination=lane.peer,
                chunk=chunk,
                payload=payload,
                num_bytes=int(getattr(payload, "nbytes", 0)),
                offered_s=self._exchange.clock(),
            )
            if not lane.lost:
                lane.num_staged_bytes += parcel.num_bytes
                self._under_way.append(parcel)
        if not lane.lost:
            self._exchange.carry(parcel, lambda: self._deliver(lane, parcel))

    def cancel(self, ticket_id: str) -> None:
        with self._exchange._lock:
            for parcel in [parcel for parcel in self._under_way if parcel.chunk.ticket_id == ticket_id]:
                self._forget(self._lanes[parcel.destination], parcel)

    def carries(self, ticket_id: str) -> bool:
        return any(parcel.chunk.ticket_id == ticket_id for parcel in self._under_way)

    def busy(self) -> bool:
        return bool(self._events or self._under_way)

    def close_lane(self, peer: str) -> None:
        with self._exchange._lock:
            if not any(parcel.destination == peer for parcel in self._under_way):
                self._lanes.pop(peer, None)

    def close(self) -> None:
        with self._exchange._lock:
            for peer in tuple(self._lanes):
                receiver = self._exchange._receivers.get(peer)
                if receiver is not None:
                    receiver._lose(self._name, f"{self._name} was closed")
            self._lanes.clear()
            self._under_way.clear()
            self._exchange._leave(self)

    def _lane(self, peer: str) -> _Lane:
        if peer not in self._lanes:
            self._lanes[peer] = _Lane(peer)
            if peer not in self._exchange._receivers:
                lane = self._lanes[peer]
                self._lose(peer, f"no receiver is at {peer}")
                return lane
        return self._lanes[peer]

    def _deliver(self, lane: _Lane, parcel: InprocParcel) -> None:
        """Delivers a parcel, unless it was cancelled or its lane was lost on the way."""
        with self._exchange._lock:
            now = self._exchange.clock()
            elapsed_s, lane.over_s = now - max(parcel.offered_s, lane.over_s), now
            if lane.lost or parcel not in self._under_way:
                return
            self._forget(lane, parcel)
            lane.moved(parcel.num_bytes, elapsed_s)
            self._events.append(Sent(chunk=parcel.chunk, num_bytes=parcel.num_bytes, elapsed_s=elapsed_s))
            self._exchange._receivers[parcel.destination]._arrive(parcel, elapsed_s)
        self._wake()

    def _forget(self, lane: _Lane, parcel: InprocParcel) -> None:
        self._under_way = [other for other in self._under_way if other is not parcel]
        lane.num_staged_bytes -= parcel.num_bytes

    def _lose(self, peer: str, reason: str) -> None:
        lane = self._lanes.pop(peer, None)
        if lane is None:
            return
        lane.lost = True
        self._under_way = [parcel for parcel in self._under_way if parcel.destination != peer]
        self._events.append(LaneLost(peer=peer, reason=reason))
        self._wake()


class InprocReceiver(_InprocEnd[Arrived | LaneLost]):
    def __init__(
        self, exchange: InprocExchange, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        super().__init__(exchange, address, layout, wake)
        self._staged: dict[Chunk, deque[Any]] = {}

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        require_compatible(source.worker_id, source_layout, self.address.worker_id, self._layout)
        with self._exchange._lock:
            name = peer_name(source)
            for peer in tuple(self._lanes):
                if peer != name and peer.rpartition("#")[0] == source.worker_id:
                    self._lose(peer, f"{source.worker_id} has been restarted")
            self._lanes.setdefault(name, _Lane(name))

    def look(self, chunk: Chunk) -> Presence:
        return Presence.HERE if chunk in self._staged else Presence.COMING

    def take(self, chunk: Chunk, timeout_s: float) -> Any:
        with self._exchange._lock:
            if chunk not in self._staged:
                raise TransferFailed(f"blocks {chunk.first_block}... of ticket {chunk.ticket_id} are not here")
            return self._pop(chunk)

    def give_back(self, payload: Any) -> None:
        pass

    def drop(self, chunk: Chunk, source: str) -> None:
        with self._exchange._lock:
            if chunk in self._staged:
                self._pop(chunk)

    def drop_source(self, source: str, kept: Collection[Chunk]) -> None:
        """Does nothing: with one rank, a chunk that arrived here has arrived everywhere."""

    def busy(self) -> bool:
        return bool(self._events or self._staged)

    def close_lane(self, peer: str) -> None:
        with self._exchange._lock:
            self._lanes.pop(peer, None)

    def close(self) -> None:
        with self._exchange._lock:
            for peer in tuple(self._lanes):
                sender = self._exchange._senders.get(peer)
                if sender is not None:
                    sender._lose(peer_name(self.address), f"{peer_name(self.address)} was closed")
            self._lanes.clear()
            self._staged.clear()
            self._exchange._leave(self)

    def _pop(self, chunk: Chunk) -> Any:
        waiting = self._staged[chunk]
        payload = waiting.popleft()
        if not waiting:
            del self._staged[chunk]
        return payload

    def _arrive(self, parcel: InprocParcel, elapsed_s: float) -> None:
        lane = self._lanes.setdefault(parcel.source, _Lane(parcel.source))
        lane.moved(parcel.num_bytes, elapsed_s)
        self._staged.setdefault(parcel.chunk, deque()).append(parcel.payload)
        self._events.append(
            Arrived(chunk=parcel.chunk, source=parcel.source, num_bytes=parcel.num_bytes, elapsed_s=elapsed_s)
        )
        self._wake()

    def _lose(self, peer: str, reason: str, cause: type[TransferFailed] = TransferFailed) -> None:
        """Drops the peer's chunks on their way. Those that have arrived may still be landed."""
        if self._lanes.pop(peer, None) is not None:
            self._events.append(LaneLost(peer=peer, reason=reason, cause=cause))
            self._wake()
