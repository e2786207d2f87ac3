"""How KV blocks travel: the seam between an engine and whatever moves bytes. Pure: no torch, payloads are opaque.

A push is cut into chunks; a chunk is some consecutive blocks of a ticket, all layers. Everything here is called from
the engine's thread and returns at once; threads of a transport's own do the waiting. On a tensor-parallel worker every
rank has its own Sender or Receiver and moves its own heads.

    prefill engine   Sender.offer(chunk, payload) ──▶ lane thread ══ wire ══▶ lane thread ──▶ Receiver.poll()   decode engine
                     Sender.poll() ◀── Sent / Lost                          Receiver.take(chunk) -> payload

Safety: a payload is a copy (staging) on both sides. The source may free its blocks when `offer` has returned; at the
destination nothing is written into a block before the engine itself lands a payload whose ticket and generation the
ledger still knows. So no late message can ever write into a block that has moved on to another owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from protos.values import KVLayout, LaneAddress, LaneStats, Ticket

PayloadIn = TypeVar("PayloadIn", contravariant=True)
PayloadOut = TypeVar("PayloadOut", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Blocks [first_block, first_block + num_blocks) of a ticket's `block_ids`."""

    ticket_id: str
    generation: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The chunk has left this host for good. `elapsed_s` is the time on the lane."""

    chunk: Chunk
    num_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The chunk's payload waits to be taken (or dropped) on this rank."""

    chunk: Chunk
    source: str
    num_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLost:
    """Nothing more comes from, or goes to, this peer over the present lane. A later offer or reserve opens a new one."""

    peer: str
    reason: str


class Sender(Protocol[PayloadIn]):
    """The prefill side. `offer` takes ownership of the payload and opens the lane if there is none."""

    def offer(self, ticket: Ticket, chunk: Chunk, payload: PayloadIn) -> None: ...
    def poll(self) -> Sequence[Sent | LaneLost]: ...
    def cancel(self, ticket_id: str) -> None:
        """Drops what has not left yet; what is on the wire is fenced at the destination. Never blocks."""
        ...

    def busy(self) -> bool: ...
    def lanes(self) -> Sequence[LaneStats]: ...
    def close(self) -> None: ...


class Receiver(Protocol[PayloadOut]):
    """The decode side. `expect` prepares the lane from `source`; it is told before the ticket leaves this worker."""

    @property
    def address(self) -> LaneAddress: ...
    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None: ...
    def poll(self) -> Sequence[Arrived | LaneLost]: ...
    def take(self, chunk: Chunk, timeout_s: float) -> PayloadOut:
        """The payload of a chunk, once. Waits for it on ranks where it has not come in yet. Raises TransferFailed."""
        ...

    def drop(self, chunk: Chunk) -> None: ...
    def busy(self) -> bool: ...
    def lanes(self) -> Sequence[LaneStats]: ...
    def close(self) -> None: ...
