"""Moves KV between this worker's cache and its lanes, on every tensor-parallel rank at once.

    pool role ──▶ Mover (rank 0) ──▶ Leader.tell ══▶ Dock of every follower rank
                       └───────────────────────────▶ Dock of rank 0

Everything returns at once: a chunk is told of when every rank has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from kvtransfer.config import LaneConfig
from kvtransfer.lanes import merged
from kvtransfer.reshard import Cut, cut_in, cut_out
from kvtransfer.transport import Arrived, Chunk, LaneLost, Presence, Receiver, Sender, Sent, peer_name
from protos.values import KVLayout, KVPiece, LaneAddress, LaneLoad, LaneStats, Ticket
from workers.timeline import Timeline
from workers.transfer.lane_upkeep import Upkeep

Payload = TypeVar("Payload")


class Blocks(Protocol[Payload]):
    """One rank's KV cache as a mover sees it."""

    def read(self, cut: Cut, stage: Callable[[int], Any]) -> Payload:
        """A copy of the cut, in memory that `stage(num_bytes)` gives."""
        ...

    def write(self, cut: Cut, payload: Payload) -> None: ...


class Tell(Protocol):
    """Has every follower rank call its operation `name` with these arguments, in the order told (`Leader.tell`)."""

    def __call__(self, name: str, *arguments: object) -> None: ...


def _alone(values: Sequence[int]) -> Sequence[int]:
    return values


def _nothing() -> None:
    """Where all that is asked for is done when the call returns."""


class Dock(Generic[Payload]):
    """One rank's end of its worker's lanes. `least` gives, for each of some numbers, the least over all ranks.

    `sender` serves a worker that pushes, `receiver` one that is pushed to; a worker may have either or both. Within
    `aside` the blocks are read without holding the computation up, until `rejoin` lets it write into blocks again;
    `mark` hears of each step that has written its last layer. `follows_layers` says that whoever computes calls
    `after_layer`.
    """

    OPERATIONS = ("open", "push", "arm", "look", "land", "drop", "forget", "expect", "cancel", "part_to", "part_from")
    """What rank 0 tells the others to do: all that `Mover` ever tells."""

    def __init__(
        self,
        blocks: Blocks[Payload],
        layout: KVLayout,
        *,
        rank: int = 0,
        sender: Sender[Payload] | None = None,
        receiver: Receiver[Payload] | None = None,
        least: Callable[[Sequence[int]], Sequence[int]] = _alone,
        aside: Callable[[int | None], AbstractContextManager[Any]] = nullcontext,
        rejoin: Callable[[], None] = _nothing,
        mark: Callable[[], None] = _nothing,
        follows_layers: bool = False,
    ) -> None:
        self.blocks = blocks
        self.layout = layout
        self.sender = sender
        self.receiver = receiver
        self._rank = rank
        self._least = least
        self._aside = aside
        self._rejoin = rejoin
        self._mark = mark
        self.follows_layers = follows_layers
        self.timeline = Timeline(time.monotonic)
        self._sources: dict[str, KVLayout] = {}  # by peer name
        self._gone: list[str] = []  # of those, whose lane has ended; what had come by then may be landed still
        self._armed: list[tuple[Ticket, Chunk, Sequence[int]]] = []

    def open(self, ticket: Ticket) -> None:
        self.sending().open(ticket)

    def push(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int], num_in_flight: int | None = None) -> None:
        """Of what was written before the last `num_in_flight` steps, if given, for which nobody waits then."""
        self._offer(ticket, chunk, block_ids, num_in_flight)
        self._rejoin()

    def arm(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """The next step completes it: it is pushed as soon as the last of its layers is written."""
        self._armed.append((ticket, chunk, block_ids))

    def after_layer(self, layer: int) -> None:
        """A step has written the KV of a layer, or will have before anything that is asked of the device now."""
        if layer == self.layout.num_layers - 1:
            self._mark()
        if not self._armed:
            return
        due = [armed for armed in self._armed if armed[1].layers(self.layout.num_layers).stop <= layer + 1]
        for armed in due:
            self._offer(*armed)
            self._armed.remove(armed)
        if due and not self._armed:
            self._rejoin()

    def look(self, chunks: Sequence[Chunk]) -> Sequence[Presence]:
        """What all ranks have of each."""
        receiver = self.receiving()
        return [Presence(value) for value in self._least([receiver.look(chunk) for chunk in chunks])]

    def land(self, chunk: Chunk, block_ids: Sequence[int], source: str) -> None:
        """Only for what is here, on every rank."""
        receiver = self.receiving()
        payload = receiver.take(chunk, 0.0)
        kv = self._piece(source, chunk, chunk.num_bytes(self.layout) // self.layout.tp)
        with self.timeline.span("KV scatter", kv=kv):
            self.blocks.write(cut_in(self.layout, self._rank, self._sources[source], chunk, block_ids), payload)
        receiver.give_back(payload)

    def drop(self, chunk: Chunk, source: str) -> None:
        self.receiving().drop(chunk, source)

    def forget(self, source: str, kept: Collection[Chunk]) -> None:
        self.receiving().forget(source, kept)
        self._gone.append(source)

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        self.receiving().expect(source, source_layout)
        for gone in self._gone:
            self._sources.pop(gone, None)
        self._gone.clear()
        self._sources[peer_name(source)] = source_layout

    def cancel(self, ticket_id: str) -> None:
        self._armed = [armed for armed in self._armed if armed[0].ticket_id != ticket_id]
        self.sending().cancel(ticket_id)

    def part_to(self, peer: str) -> None:
        self.sending().part(peer)

    def part_from(self, peer: str) -> None:
        self.receiving().part(peer)
        self._gone.append(peer)

    def settle(self) -> None:
        """Followers call it after every operation. What they would report is not needed: rank 0 asks them to look
        for what has come to itself."""
        for end in (self.sender, self.receiver):
            if end is not None:
                end.poll()

    def lanes_out(self) -> Sequence[LaneStats]:
        return self.sender.lanes() if self.sender else ()

    def lanes_in(self) -> Sequence[LaneStats]:
        return self.receiver.lanes() if self.receiver else ()

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            if end is not None:
                end.close()

    def sending(self) -> Sender[Payload]:
        assert self.sender is not None, "a worker without a sender was asked to push"
        return self.sender

    def receiving(self) -> Receiver[Payload]:
        assert self.receiver is not None, "a worker without a receiver was asked to land"
        return self.receiver

    def _offer(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int], num_in_flight: int | None = None) -> None:
        cut = cut_out(self.layout, self._rank, ticket, chunk, block_ids)
        if not cut.pieces:
            return  # other ranks have copies of this one's heads, and send them
        sender = self.sending()
        kv = self._piece(peer_name(ticket.destination), chunk, chunk.num_bytes(ticket.layout) // self.layout.tp)
        with self._aside(num_in_flight), self.timeline.span("KV gather", kv=kv):
            sender.offer(ticket, chunk, self.blocks.read(cut, sender.stage))

    def show(self, name: str, event: Sent | Arrived, peer: str, hidden_s: float = 0.0) -> None:
        """In a profile, if there is one: what a lane took for a chunk."""
        if self.timeline.recording and event.ended_s is not None:
            kv = self._piece(peer, event.chunk, event.num_bytes, hidden_s)
            self.timeline.add(name, event.ended_s - event.elapsed_s, event.ended_s, kv=kv)

    def _piece(self, peer: str, chunk: Chunk, num_bytes: int, hidden_s: float = 0.0) -> KVPiece | None:
        if not self.timeline.recording:
            return None
        layers = chunk.layers(self.layout.num_layers)
        return KVPiece(
            peer=peer,
            ticket_id=chunk.ticket_id,
            num_bytes=num_bytes,
            first_block=chunk.first_block,
            num_blocks=chunk.num_blocks,
            first_layer=layers.start,
            num_layers=len(layers),
            hidden_s=hidden_s,
        )


class Mover:
    """What a pool role moves KV with. Lives at rank 0 and is called between two steps, from the engine's thread.

    Block ids are this worker's own, in the prompt's order: to push, those that hold the chunk's tokens, as far as they
    were written (`kvtransfer.reshard.covering`); to land, one for each block of the chunk.
    """

    def __init__(self, dock: Dock[Any], tell: Tell, lanes: LaneConfig | None = None) -> None:
        lanes = lanes or LaneConfig()
        self.destinations = Upkeep(dock.lanes_out, self._part_to, lanes)
        self.sources = Upkeep(dock.lanes_in, self._part_from, lanes)
        self._dock = dock
        self._tell = tell
        self._coming: list[Arrived] = []  # at rank 0, and not everywhere yet
        self._loads: list[LaneLoad] = []
        self._merged: tuple[LaneLoad, ...] = ()  # of those
        self._sources: dict[Chunk, str] = {}  # of what was told of, and not landed or dropped yet

    @property
    def address(self) -> LaneAddress:
        """Where this worker's receivers can be met."""
        return self._dock.receiving().address

    def open(self, ticket: Ticket) -> None:
        """Begins to open the lane to the ticket's destination. Raises IncompatibleWorkers."""
        self._tell("open", ticket)
        self._dock.open(ticket)

    def can_push(self, ticket: Ticket) -> bool:
        """May a chunk be pushed now, or is the lane's staging full at rank 0? The other ranks' are much the same."""
        return self._dock.sending().can_offer(ticket)

    def push(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int], num_in_flight: int | None = None) -> None:
        """Copies the blocks and sends them to the ticket's destination. They may be freed once this returns. The steps
        in flight write nothing that has been computed, if it is said how many there are: then nobody waits for
        those."""
        self._tell("push", ticket, chunk, tuple(block_ids), num_in_flight)
        self._dock.push(ticket, chunk, block_ids, num_in_flight)

    @property
    def follows_layers(self) -> bool:
        """Is it known when a step has written a layer, so that `arm` has an effect?"""
        return self._dock.follows_layers

    def arm(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """The same for a chunk that the step to be launched next will complete, as soon as that has written its last
        layer. Once it is launched the blocks may be freed, as far as pushing goes."""
        self._tell("arm", ticket, chunk, tuple(block_ids))
        self._dock.arm(ticket, chunk, block_ids)

    def land(self, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """Writes a chunk that `poll_arrived` has told of into these blocks, on every rank."""
        assert len(block_ids) == chunk.num_blocks
        source = self._sources.pop(chunk)
        self._tell("land", chunk, tuple(block_ids), source)
        self._dock.land(chunk, block_ids, source)

    def drop(self, chunk: Chunk) -> None:
        """Forgets an arrived chunk that nobody wants any more."""
        self._drop(chunk, self._sources.pop(chunk))

    def _drop(self, chunk: Chunk, source: str) -> None:
        self._tell("drop", chunk, source)
        self._dock.drop(chunk, source)

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        """Prepares the lane from `source`. To be called before the ticket leaves this worker, and when all that
        `poll_arrived` has told of is landed or dropped."""
        self._tell("expect", source, source_layout)
        self._dock.expect(source, source_layout)

    def cancel(self, ticket_id: str) -> None:
        """Stops sending for a ticket."""
        self._tell("cancel", ticket_id)
        self._dock.cancel(ticket_id)

    def record(self, timeline: Timeline) -> None:
        """Where rank 0's share of what moves is told of."""
        self._dock.timeline = timeline

    def show_sent(self, event: Sent, ticket: Ticket, hidden_s: float) -> None:
        """In a profile: for so much of the time the sequence was still computed."""
        self._dock.show("KV send", event, peer_name(ticket.destination), hidden_s)

    def poll_sent(self) -> Sequence[Sent | LaneLost]:
        """What rank 0 has sent, and lost, since the last call."""
        return self._dock.sender.poll() if self._dock.sender else ()

    def poll_arrived(self) -> Sequence[Arrived | LaneLost]:
        """What has arrived on every rank since the last call, each to be landed or dropped, and what rank 0 has lost.
        A chunk that is cancelled on its way is not told of: its ticket ends by itself."""
        events = self._dock.receiver.poll() if self._dock.receiver else ()
        self._coming += [event for event in events if isinstance(event, Arrived)]
        told: list[Arrived | LaneLost] = list(self._everywhere())
        for event in events:
            if isinstance(event, LaneLost):
                self._forget(event.peer)
                told.append(event)
        return told

    def _everywhere(self) -> Sequence[Arrived]:
        """A chunk that came twice is looked for once at a time: that is what each rank can answer."""
        asked: dict[Chunk, Arrived] = {}
        for event in self._coming:
            if event.chunk not in self._sources:
                asked.setdefault(event.chunk, event)
        if not asked:
            return ()
        self._tell("look", tuple(asked))
        found = list(zip(asked.values(), self._dock.look(tuple(asked)), strict=True))
        here = [event for event, presence in found if presence is Presence.HERE]
        void = [event for event, presence in found if presence is Presence.VOID]
        self._coming = [event for event in self._coming if not any(event is done for done in (*here, *void))]
        self._sources.update((event.chunk, event.source) for event in here)
        for event in here:
            self._dock.show("KV receive", event, event.source)
        for event in void:
            self._drop(event.chunk, event.source)
        return here

    def _forget(self, peer: str) -> None:
        """What came from a lost peer to some ranks only never will to the others."""
        self._coming = [event for event in self._coming if event.source != peer]
        kept = tuple(chunk for chunk, source in self._sources.items() if source == peer)
        self._tell("forget", peer, kept)
        self._dock.forget(peer, kept)

    def is_sending(self) -> bool:
        """Is anything on its way from rank 0, or has left and was not polled?"""
        return self._dock.sender is not None and self._dock.sender.busy()

    def busy(self) -> bool:
        """Is anything on its way at rank 0, or does a lane idle for too long?"""
        return self.is_moving() or self.destinations.overdue() or self.sources.overdue()

    def is_moving(self) -> bool:
        """Is anything on its way at rank 0?"""
        return any(end.busy() for end in (self._dock.sender, self._dock.receiver) if end is not None)

    def lanes(self) -> Sequence[LaneStats]:
        return [*self._dock.lanes_out(), *self._dock.lanes_in()]

    def lane_loads(self) -> tuple[LaneLoad, ...]:
        """How rank 0's lanes fare, by transport."""
        ends = (self._dock.sender, self._dock.receiver)
        loads = [load for end in ends if end is not None for load in end.loads()]
        if loads != self._loads:  # they seldom change, and every message of a worker tells of them
            self._loads, self._merged = loads, merged(loads)
        return self._merged

    def _part_to(self, peer: str) -> None:
        self._tell("part_to", peer)
        self._dock.part_to(peer)

    def _part_from(self, peer: str) -> None:
        self._tell("part_from", peer)
        self._dock.part_from(peer)

    def close(self) -> None:
        """Closes rank 0's lanes; a follower closes its own when it is told to stop."""
        self._dock.close()
