"""Lanes between workers: one small group of links per pair, made on demand, that spans all ranks of both.

    engine thread    stage, offer ─▶ queue     poll ◀─ events      take ◀─ staged ── give_back
    lane threads                     └▶ send headers, pieces ══ wire ══▶ receive headers, pieces ─▶┘

Each lane has a thread at the sending end, and one for each source rank at the receiving end: they alone wait for the
network. An idle sender sends heartbeats: by them the peer distinguishes idle from hung, and the sender finds out that
its peer has gone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from msgspec.structs import replace

from kvtransfer.lane_rules import LaneConfig
from kvtransfer.reshard import incoming, outgoing, require_compatible
from kvtransfer.transport import Arrived, Chunk, LaneLost, Presence, Sent, peer_name
from kvtransfer.transports.collective.lane import Lane, LaneCounters, end_all
from kvtransfer.transports.collective.lane_wire import LaneWire, PayloadCorrupted, Rendezvous
from kvtransfer.transports.collective.receiving import Inbox, IncomingPayload
from kvtransfer.transports.collective.sending import Outbox, QueuedPayload
from kvtransfer.transports.links.links import LaneRank
from kvtransfer.transports.links.nccl import keep_no_watchdog
from kvtransfer.transports.links.staging_memory import Staging
from kvtransfer.transports.rendezvous.rendezvous_store import RendezvousServer
from protos.errors import TransferCorrupted, TransferFailed
from protos.values import KVLayout, LaneAddress, LaneLoad, LaneStats, Ticket

_cuda: Any = torch.cuda

Event = TypeVar("Event")
Parcels = TypeVar("Parcels", Outbox, Inbox)


class CollectiveTransport:
    """One rank's ends of lanes. `rank` counts over the worker's tensor-parallel ranks, whose group exists already;
    `device` holds payloads; links listen at `host`, "" for the host of an end's address."""

    def __init__(self, *, rank: int = 0, device: str = "cpu", host: str = "", config: LaneConfig | None = None) -> None:
        self.rank = rank
        self.device = device
        self.host = host
        self.config = config or LaneConfig()
        if torch.device(device).type == "cuda":
            keep_no_watchdog()

    def sender(
        self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = lambda: None
    ) -> CollectiveSender:
        """`wake` is called from lane threads whenever `poll` has an event."""
        return CollectiveSender(self, address, layout, wake)

    def receiver(
        self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = lambda: None
    ) -> CollectiveReceiver:
        """Rank 0 opens the meeting place if `address.port` is 0; the other ranks are given rank 0's address."""
        return CollectiveReceiver(self, address, layout, wake)


class _LanesEnd(Generic[Event, Parcels]):
    """The part that both ends of a worker's lanes share. `_lanes` holds the lanes in use, by peer name."""

    def __init__(
        self, transport: CollectiveTransport, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        self.address = address
        self._transport = transport
        self._layout = layout
        self._wake = wake
        self._bind_host = transport.host or address.host
        self._staging = Staging(device=transport.device, max_bytes=transport.config.max_staged_bytes)
        self._changed = threading.Condition(threading.RLock())
        self._counters = LaneCounters()
        self._lanes: dict[str, Parcels] = {}
        self._threads: list[Lane] = []  # of lost lanes too, until they have ended
        self._events: deque[Event] = deque()

    def poll(self) -> Sequence[Event]:
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    def lanes(self) -> Sequence[LaneStats]:
        with self._changed:
            return [parcels.lane.stats() for parcels in self._lanes.values()]

    def lane_loads(self) -> Sequence[LaneLoad]:
        return self._counters.lane_loads()

    def close(self) -> None:
        with self._changed:
            ending = self._threads
            for lane in ending:
                lane.closing.set()
            self._changed.notify_all()
        end_all(ending)

    def _lane_rank(self, rank: int, size: int, peer_ranks: tuple[int, ...], *, sends: bool) -> LaneRank:
        device, config = self._transport.device, self._transport.config
        return LaneRank(
            rank=rank, size=size, peer_ranks=peer_ranks, sends=sends, bind_host=self._bind_host, device=device,
            config=config,
        )  # fmt: skip

    def _make_lane(self, peer: str, meeting: Rendezvous, wait_s: float) -> Lane:
        lane = Lane(peer, meeting, self._counters, self._transport.config, wait_s=wait_s)
        self._threads = [*(other for other in self._threads if not other.ended()), lane]
        return lane

    def _over(self, parcels: Parcels) -> bool:
        with self._changed:
            ends = parcels.lane.closing.is_set() or parcels.lane.closing_idle
            if ends:
                self._forget(parcels)
            return ends

    def _forget(self, parcels: Parcels) -> None:
        if self._lanes.get(parcels.lane.peer) is parcels:
            del self._lanes[parcels.lane.peer]


class CollectiveSender(_LanesEnd[Sent | LaneLost, Outbox]):
    def open(self, ticket: Ticket) -> None:
        require_compatible(self.address.worker_id, self._layout, ticket.destination.worker_id, ticket.layout)
        self._lane(ticket)

    def can_offer(self, ticket: Ticket) -> bool:
        with self._changed:
            outbox = self._lanes.get(peer_name(ticket.destination))
            return outbox is None or outbox.lane.num_staged_bytes < self._transport.config.max_staged_bytes

    def stage(self, num_bytes: int) -> torch.Tensor:
        return self._staging.take(num_bytes)

    def offer(self, ticket: Ticket, chunk: Chunk, payload: torch.Tensor) -> None:
        ready = None
        if payload.is_cuda:
            ready = _cuda.Event()
            ready.record()
        with self._changed:
            self._lane(ticket).put(QueuedPayload(chunk=chunk, payload=payload.reshape(-1), ready=ready))

    def cancel(self, ticket_id: str) -> None:
        with self._changed:
            for outbox in self._lanes.values():
                outbox.remove(ticket_id)

    def busy(self) -> bool:
        with self._changed:
            return bool(self._events) or any(outbox.queue or outbox.on_wire for outbox in self._lanes.values())

    def _lane(self, ticket: Ticket) -> Outbox:
        peer = peer_name(ticket.destination)
        with self._changed:
            if peer in self._lanes:
                self._lanes[peer].lane.still_wanted()
                return self._lanes[peer]
            transport, config, source_tp = self._transport, self._transport.config, self._layout.tp
            slices = outgoing(self._layout, ticket.layout, transport.rank)
            peer_ranks = tuple(source_tp + part.destination for part in slices)
            at = self._lane_rank(transport.rank, source_tp + ticket.layout.tp, peer_ranks, sends=True)
            lane = self._make_lane(peer, Rendezvous(self.address, ticket.destination, at), config.stall_s)
            self._lanes[peer] = outbox = Outbox(
                lane, slices, source_tp=source_tp, changed=self._changed, staging=self._staging, config=config
            )
            lane.start(
                [lambda wire: self._work(outbox, wire)],
                lost=partial(self._lost, outbox),
                over=partial(self._over, outbox),
            )
            return outbox

    def close_lane(self, peer: str) -> None:
        with self._changed:
            if peer in self._lanes:
                self._lanes[peer].lane.closing_idle = True
                self._changed.notify_all()

    def _work(self, outbox: Outbox, wire: LaneWire) -> None:
        sent = outbox.work(wire)
        if sent is not None:
            with self._changed:
                self._events.append(sent)
        if sent is not None or outbox.lane.idles():
            self._wake()

    def _lost(self, outbox: Outbox, reason: Exception, final: bool) -> None:
        with self._changed:
            outbox.clear()
            if final:
                self._forget(outbox)
            self._events.append(_loss(outbox.lane.peer, reason))
        self._wake()


class CollectiveReceiver(_LanesEnd[Arrived | LaneLost, Inbox]):
    def __init__(
        self, transport: CollectiveTransport, address: LaneAddress, layout: KVLayout, wake: Callable[[], None]
    ) -> None:
        self._server = None
        if transport.rank == 0 and address.port == 0:
            self._server = RendezvousServer(address.host, key=address.key.encode())
            address = replace(address, port=self._server.port, key=self._server.key.decode())
        super().__init__(transport, address, layout, wake)
        self._staged: dict[Chunk, deque[IncomingPayload]] = {}
        self._unwanted: Counter[tuple[str, Chunk]] = Counter()  # by source: chunks to drop as soon as they arrive

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        require_compatible(source.worker_id, source_layout, self.address.worker_id, self._layout)
        peer = peer_name(source)
        with self._changed:
            if peer in self._lanes:
                self._lanes[peer].lane.still_wanted()
                return
            stale = [old for name, old in self._lanes.items() if name.rpartition("#")[0] == source.worker_id]
            self._lanes[peer] = self._open(source, source_layout)
            for old in stale:
                self._forget(old)
                self._events.append(LaneLost(peer=old.lane.peer, reason=f"{source.worker_id} has been restarted"))
        for old in stale:
            old.lane.end()
            self._wake()

    def look(self, chunk: Chunk) -> Presence:
        with self._changed:
            if chunk not in self._staged:
                return Presence.COMING
            return Presence.VOID if self._staged[chunk][0].void else Presence.HERE

    def take(self, chunk: Chunk, timeout_s: float) -> torch.Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: chunk in self._staged, timeout_s):
                raise TransferFailed(f"{chunk} did not reach rank {self._transport.rank} within {timeout_s:g} s")
            payload = self._pop(chunk)
        if payload is None:
            raise TransferFailed(f"blocks from {chunk.first_block} of ticket {chunk.ticket_id} were cancelled")
        return payload

    def give_back(self, payload: torch.Tensor) -> None:
        self._staging.give(payload)

    def drop(self, chunk: Chunk, source: str) -> None:
        with self._changed:
            if chunk not in self._staged:
                if source in self._lanes:
                    self._unwanted[source, chunk] += 1
            elif (payload := self._pop(chunk)) is not None:
                self._staging.give(payload)

    def drop_source(self, source: str, kept: Collection[Chunk]) -> None:
        with self._changed:
            for chunk, parcels in tuple(self._staged.items()):
                if chunk not in kept and parcels[0].lane.peer == source:
                    self.drop(chunk, source)

    def busy(self) -> bool:
        with self._changed:
            return bool(self._events or self._staged)

    def close_lane(self, peer: str) -> None:
        with self._changed:
            if peer in self._lanes:
                self._lanes[peer].lane.close_idle()

    def close(self) -> None:
        super().close()
        self._staged.clear()
        if self._server is not None:
            self._server.close()

    def _open(self, source: LaneAddress, source_layout: KVLayout) -> Inbox:
        transport, config = self._transport, self._transport.config
        slices = incoming(source_layout, self._layout, transport.rank)
        rank, size = source_layout.tp + transport.rank, source_layout.tp + self._layout.tp
        at = self._lane_rank(rank, size, tuple(part.source for part in slices), sends=False)
        lane = self._make_lane(peer_name(source), Rendezvous(source, self.address, at), config.connect_timeout_s)
        inbox = Inbox(
            lane,
            slices,
            self._layout,
            changed=self._changed,
            staging=self._staging,
            max_staged_bytes=config.max_staged_bytes,
            arrived=self._arrived,
            wake=self._wake,
        )
        lane.start(inbox.works(), lost=partial(self._lost, inbox), over=partial(self._over, inbox))
        return inbox

    def _arrived(self, parcel: IncomingPayload, elapsed_s: float) -> None:
        chunk, inbox = parcel.chunk, self._lanes.get(parcel.lane.peer)
        awaited = (parcel.lane.peer, chunk)
        if inbox is None or inbox.lane is not parcel.lane or self._unwanted[awaited]:
            self._unwanted -= Counter({awaited: 1})  # and forgets those at 0
            self._unstage(parcel)
            if parcel.payload is not None:
                self._staging.give(parcel.payload)
            return
        self._staged.setdefault(chunk, deque()).append(parcel)
        self._events.append(
            Arrived(
                chunk=chunk, source=parcel.lane.peer, num_bytes=parcel.num_bytes,
                elapsed_s=elapsed_s, ended_s=parcel.begun_s + elapsed_s,
            )
        )  # fmt: skip
        self._changed.notify_all()

    def _pop(self, chunk: Chunk) -> torch.Tensor | None:
        waiting = self._staged[chunk]
        parcel = waiting.popleft()
        if not waiting:
            del self._staged[chunk]
        self._unstage(parcel)
        return parcel.payload

    def _unstage(self, parcel: IncomingPayload) -> None:
        parcel.lane.num_staged_bytes -= parcel.num_bytes
        self._changed.notify_all()

    def _lost(self, inbox: Inbox, reason: Exception, final: bool) -> None:
        """Drops incomplete payloads. Complete ones may still be landed."""
        self._clear(inbox)
        with self._changed:
            if final:
                self._forget(inbox)
            self._events.append(_loss(inbox.lane.peer, reason))
        self._wake()

    def _over(self, inbox: Inbox) -> bool:
        self._clear(inbox)
        return super()._over(inbox)

    def _clear(self, inbox: Inbox) -> None:
        """Drops all chunks on their way: the wire is gone."""
        inbox.clear()
        with self._changed:
            if self._lanes.get(inbox.lane.peer, inbox) is inbox:
                for awaited in [awaited for awaited in self._unwanted if awaited[0] == inbox.lane.peer]:
                    del self._unwanted[awaited]


def _loss(peer: str, reason: Exception) -> LaneLost:
    cause = TransferCorrupted if isinstance(reason, PayloadCorrupted) else TransferFailed
    return LaneLost(peer=peer, reason=str(reason), cause=cause)
