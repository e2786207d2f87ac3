"""One tensor-parallel rank's half of KV transfer: between its cache and its ends of the worker's lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from kvtransfer.reshard import Cut, cut_in, cut_out
from kvtransfer.transport import Arrived, Chunk, Presence, Receiver, Sender, Sent, peer_name
from protos.values import KVLayout, KVPiece, LaneAddress, LaneStats, Ticket
from workers.timeline import Timeline

Payload = TypeVar("Payload")


class Blocks(Protocol[Payload]):
    """One rank's KV cache, as transfers read and write it."""

    def read(self, cut: Cut, stage: Callable[[int], Any]) -> Payload: ...

    def write(self, cut: Cut, payload: Payload) -> None: ...


class RankTransfer(Generic[Payload]):
    """The `TransferOperations` of one rank. `least` returns, for each of some numbers, the least over all ranks.

    `sender` serves a worker that pushes, `receiver` one that is pushed to; a worker may have either or both. Within
    `aside` the blocks are read without holding the computation up, until `rejoin` lets it write into blocks again;
    `mark` is called when a step has written its last layer. `follows_layers`: the runner calls `after_layer`.
    """

    def __init__(
        self,
        blocks: Blocks[Payload],
        layout: KVLayout,
        *,
        rank: int = 0,
        sender: Sender[Payload] | None = None,
        receiver: Receiver[Payload] | None = None,
        least: Callable[[Sequence[int]], Sequence[int]] = lambda values: values,
        aside: Callable[[int | None], AbstractContextManager[Any]] = nullcontext,
        rejoin: Callable[[], None] = lambda: None,
        mark: Callable[[], None] = lambda: None,
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
        self._gone: list[str] = []  # chunks of tickets whose lane has ended; those that arrived may still be landed
        self._armed: list[tuple[Ticket, Chunk, Sequence[int]]] = []

    def open(self, ticket: Ticket) -> None:
        self.sending().open(ticket)

    def push(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int], num_in_flight: int | None = None) -> None:
        """Pushes blocks that `num_in_flight` steps do not write: reading does not wait for those. None: it waits for
        all."""
        self._offer(ticket, chunk, block_ids, num_in_flight)
        self._rejoin()

    def arm(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """Pushes the chunk as soon as the next step has written the last of its layers."""
        self._armed.append((ticket, chunk, block_ids))

    def after_layer(self, layer: int) -> None:
        """A step has written, or queued, the KV of a layer."""
        if layer == self.layout.num_layers - 1:
            self._mark()
        if not self._armed:
            return
        due = [armed for armed in self._armed if self._last_layer(armed[1]) <= layer]
        for armed in due:
            self._offer(*armed)
            self._armed.remove(armed)
        if due and not self._armed:
            self._rejoin()

    def look(self, chunks: Sequence[Chunk]) -> Sequence[Presence]:
        receiver = self.receiving()
        return [Presence(value) for value in self._least([receiver.look(chunk) for chunk in chunks])]

    def land(self, chunk: Chunk, block_ids: Sequence[int], source: str) -> None:
        """Writes a chunk that is here on every rank into these blocks."""
        receiver = self.receiving()
        payload = receiver.take(chunk, 0.0)
        kv = self._piece(source, chunk, chunk.num_bytes(self.layout) // self.layout.tp)
        with self.timeline.span("KV scatter", kv=kv):
            self.blocks.write(cut_in(self.layout, self._rank, self._sources[source], chunk, block_ids), payload)
        receiver.give_back(payload)

    def drop(self, chunk: Chunk, source: str) -> None:
        self.receiving().drop(chunk, source)

    def drop_source(self, source: str, kept: Collection[Chunk]) -> None:
        self.receiving().drop_source(source, kept)
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

    def close_lane_to(self, peer: str) -> None:
        self.sending().close_lane(peer)

    def close_lane_from(self, peer: str) -> None:
        self.receiving().close_lane(peer)
        self._gone.append(peer)

    def poll(self) -> None:
        """Drops the events of a follower's lanes: `look` searches for the chunks that arrived at rank 0."""
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
            return  # other ranks send their copies of this rank's heads
        sender = self.sending()
        kv = self._piece(peer_name(ticket.destination), chunk, chunk.num_bytes(ticket.layout) // self.layout.tp)
        with self._aside(num_in_flight), self.timeline.span("KV gather", kv=kv):
            sender.offer(ticket, chunk, self.blocks.read(cut, sender.stage))

    def _last_layer(self, chunk: Chunk) -> int:
        """The last layer of a chunk, in the order in which a step writes them."""
        return self.layout.groups[chunk.group].layers[chunk.layers(self.layout).stop - 1]

    def show(self, name: str, event: Sent | Arrived, peer: str, hidden_s: float = 0.0) -> None:
        """Adds the time that a lane took for a chunk to the profile, if one is recorded."""
        if self.timeline.recording and event.ended_s is not None:
            kv = self._piece(peer, event.chunk, event.num_bytes, hidden_s)
            self.timeline.add(name, event.ended_s - event.elapsed_s, event.ended_s, kv=kv)

    def _piece(self, peer: str, chunk: Chunk, num_bytes: int, hidden_s: float = 0.0) -> KVPiece | None:
        if not self.timeline.recording:
            return None
        layers = chunk.layers(self.layout)
        return KVPiece(
            peer=peer,
            ticket_id=chunk.ticket_id,
            num_bytes=num_bytes,
            first_block=chunk.first_block,
            num_blocks=chunk.num_blocks,
            first_layer=self.layout.groups[chunk.group].layers[layers.start],
            num_layers=len(layers),
            hidden_s=hidden_s,
        )
