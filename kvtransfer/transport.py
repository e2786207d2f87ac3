"""How KV blocks travel: the seam between an engine and a transport. Pure: no torch, payloads are opaque.

A push is cut into chunks; a chunk is some consecutive blocks of a ticket, of all layers or some. Everything here is
called from the engine's thread and returns at once; threads of a transport's own do the waiting. On a tensor-parallel
worker every rank has its own Sender or Receiver and moves its own heads (`kvtransfer.reshard`).

    prefill engine                                                                          decode engine
    Sender.offer(chunk, payload) ──▶ lane thread ══ wire ══▶ lane thread ──▶ Receiver.poll()
    Sender.poll() ◀── Sent, LaneLost                                      Receiver.take(chunk) -> payload

Safety: a payload is a copy (staging) on both sides. The source may free its blocks when `offer` has returned; at the
destination nothing is written into a block before the engine itself lands a payload whose ticket and generation the
ledger still knows. So no late message can ever write into a block that has moved on to another owner.

Staging is bounded: a lane takes payloads while `can_offer` returns True, and its receiving end reads the wire only
while less than its share waits to be taken. The share is per lane, and chunks of a lane arrive in the order they were
offered, on every rank alike: so ranks that take in rank 0's order never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from protos.codec import Value
from protos.errors import TransferFailed
from protos.values import KVLayout, LaneAddress, LaneLoad, LaneStats, Ticket

PayloadIn = TypeVar("PayloadIn", contravariant=True)
PayloadOut = TypeVar("PayloadOut")


MAX_TICKET_ID_BYTES = 256


def peer_name(address: LaneAddress) -> str:
    """The name of one life of a worker, for lanes and the ledger: a restarted worker is another peer."""
    return f"{address.worker_id}#{address.incarnation}"


class Chunk(Value, frozen=True, kw_only=True):
    """Blocks [first_block, first_block + num_blocks) of a ticket's table for `group`, and of them that group's layers
    [first_layer, first_layer + num_layers): all from the first on if `num_layers` is None."""

    ticket_id: str
    generation: int
    first_block: int
    num_blocks: int
    first_layer: int = 0
    num_layers: int | None = None
    group: int = 0

    def layers(self, layout: KVLayout) -> range:
        """The chunk's layers, counted in its group. May lie outside the group for a chunk from elsewhere; the group
        exists."""
        if self.num_layers is None:
            return range(self.first_layer, len(layout.groups[self.group].layers))
        return range(self.first_layer, self.first_layer + self.num_layers)

    def carries_head(self, layout: KVLayout) -> bool:
        """Whether KV of the layout's head goes with the chunk: with the last layer of the first group."""
        return layout.head is not None and not self.group and self.layers(layout).stop == len(layout.groups[0].layers)

    def num_bytes(self, layout: KVLayout) -> int:
        """Bytes over all ranks of a destination with this layout."""
        num_layers = len(layout.groups[self.group].layers)
        of_head = layout.head_bytes if self.carries_head(layout) else 0
        return self.num_blocks * (layout.page_bytes(self.group) * len(self.layers(layout)) // num_layers + of_head)


class Sent(Value, frozen=True, kw_only=True):
    """A chunk that was sent: `num_bytes` in `elapsed_s` on the lane, until `ended_s` by the monotonic clock (None for a
    lane without a clock)."""

    chunk: Chunk
    num_bytes: int
    elapsed_s: float
    ended_s: float | None = None


class Arrived(Value, frozen=True, kw_only=True):
    """The chunk's payload waits to be taken (or dropped) on this rank, or has turned out to be void: then `num_bytes`
    is 0. `source` is the sender's `peer_name`; times are those of `Sent`."""

    chunk: Chunk
    source: str
    num_bytes: int
    elapsed_s: float
    ended_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLost:
    """The lane from or to this peer has ended, and unsent payloads are dropped. Returned once for each lane; a later
    `open`, `offer` or `expect` makes a new one. `peer`: its `peer_name`; `cause`: the error of waiting requests."""

    peer: str
    reason: str
    cause: type[TransferFailed] = TransferFailed


class Presence(IntEnum):
    """Bytes of a chunk on one rank. The smallest of a worker's ranks counts."""

    VOID = 0  # the source has cancelled the chunk
    COMING = 1  # or never known here
    HERE = 2


class Sender(Protocol[PayloadIn]):
    """The prefill side. A lane to a peer is opened by `open`, or else by the first `offer`."""

    @property
    def address(self) -> LaneAddress:
        """The address of this worker for peers. Peers do not connect to a sender: `port` may be 0."""
        ...

    def open(self, ticket: Ticket) -> None:
        """Begins to open the lane to the ticket's destination, if there is none. Raises IncompatibleWorkers."""
        ...

    def can_offer(self, ticket: Ticket) -> bool:
        """Whether the ticket's lane has staging room. One chunk may overshoot it."""
        ...

    def stage(self, num_bytes: int) -> Any:
        """Returns memory for a payload, reused if possible: uint8 [num_bytes]. `offer` takes it back."""
        ...

    def offer(self, ticket: Ticket, chunk: Chunk, payload: PayloadIn) -> None:
        """Takes ownership of the payload. Never refuses: the caller checks the bound with `can_offer` first."""
        ...

    def poll(self) -> Sequence[Sent | LaneLost]: ...
    def cancel(self, ticket_id: str) -> None:
        """Drops unsent chunks; chunks on the wire are fenced at the destination. Never blocks."""
        ...

    def busy(self) -> bool:
        """True if a payload waits or is on the wire, or an event waits to be polled."""
        ...

    def lanes(self) -> Sequence[LaneStats]: ...
    def lane_loads(self) -> Sequence[LaneLoad]: ...
    def close_lane(self, peer: str) -> None:
        """Closes the lane to a peer once offered chunks are sent, without loss at either end. The lane stays if it is
        opened again, or gets a chunk, before it has closed."""
        ...

    def close(self) -> None:
        """Ends every lane and its thread. Unsent chunks are dropped."""
        ...


class Receiver(Protocol[PayloadOut]):
    """The decode side."""

    @property
    def address(self) -> LaneAddress:
        """Where senders meet this worker."""
        ...

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        """Begins to open the lane from `source`, if there is none. Called before the ticket leaves this worker.
        Ends the lanes of the source's earlier incarnations. Raises IncompatibleWorkers."""
        ...

    def poll(self) -> Sequence[Arrived | LaneLost]: ...
    def look(self, chunk: Chunk) -> Presence:
        """Which chunks `take` would find now on this rank."""
        ...

    def take(self, chunk: Chunk, timeout_s: float) -> PayloadOut:
        """Returns a chunk's payload, once; waits for it on ranks where it has not arrived. Raises TransferFailed."""
        ...

    def give_back(self, payload: PayloadOut) -> None:
        """Releases the memory of a chunk that has been landed."""
        ...

    def drop(self, chunk: Chunk, source: str) -> None:
        """Drops a chunk and its payload, now or when it arrives. A chunk that has not arrived is dropped only while the
        lane from `source` lasts."""
        ...

    def drop_source(self, source: str, kept: Collection[Chunk]) -> None:
        """Drops the chunks of a lost peer, except these."""
        ...

    def busy(self) -> bool:
        """True if a payload waits to be taken, or an event to be polled."""
        ...

    def lanes(self) -> Sequence[LaneStats]: ...
    def lane_loads(self) -> Sequence[LaneLoad]: ...
    def close_lane(self, peer: str) -> None:
        """Closes the lane from a peer without live tickets. The lane opens again if the peer is expected meanwhile."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes one rank's ends. `wake` is called from any thread when `poll` has something to return."""

    def sender(self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = ...) -> Sender[Any]: ...

    def receiver(self, address: LaneAddress, layout: KVLayout, *, wake: Callable[[], None] = ...) -> Receiver[Any]:
        """Rank 0 opens the rendezvous server, unless `address.port` names one. The other ranks are given rank 0's
        address."""
        ...
