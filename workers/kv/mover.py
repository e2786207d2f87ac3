"""Moves KV between this worker's cache and its lanes, on every tensor-parallel rank at once.

    pool role ──▶ Mover (rank 0) ──▶ Leader.tell ══▶ Dock of every follower rank
                       └───────────────────────────▶ Dock of rank 0

Everything returns at once, except `land`, which may wait for a rank whose bytes are a moment behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvtransfer.transport import Arrived, Chunk, LaneLost, Receiver, Sender, Sent
from protos.errors import TransferFailed
from protos.values import KVLayout, LaneAddress, LaneStats, Ticket

Payload = TypeVar("Payload")


class Blocks(Protocol[Payload]):
    """One rank's KV cache as a mover sees it: a payload is a copy of some blocks, all layers, this rank's heads."""

    def gather(self, block_ids: Sequence[int]) -> Payload: ...
    def scatter(self, block_ids: Sequence[int], payload: Payload) -> None: ...


class Tell(Protocol):
    """Has every follower rank call its operation `name` with these arguments, in the order told (`Leader.tell`)."""

    def __call__(self, name: str, *arguments: object) -> None: ...


class Dock(Generic[Payload]):
    """One rank's end of its worker's lanes. `agree` is the minimum of a flag over all ranks, or the flag itself.

    `sender` serves a worker that pushes, `receiver` one that is pushed to; a worker may have either or both.
    """

    OPERATIONS = ("open", "push", "land", "drop", "expect", "cancel")
    """What rank 0 tells the others to do: all that `Mover` ever tells."""

    def __init__(
        self,
        blocks: Blocks[Payload],
        *,
        sender: Sender[Payload] | None = None,
        receiver: Receiver[Payload] | None = None,
        agree: Callable[[bool], bool] = bool,
        take_timeout_s: float = 5.0,
    ) -> None:
        self.blocks = blocks
        self.sender = sender
        self.receiver = receiver
        self._agree = agree
        self._take_timeout_s = take_timeout_s

    def open(self, ticket: Ticket) -> None:
        self.sending().open(ticket)

    def push(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> None:
        self.sending().offer(ticket, chunk, self.blocks.gather(block_ids))

    def land(self, chunk: Chunk, block_ids: Sequence[int]) -> bool:
        """All ranks write the payload into their blocks, or none does."""
        try:
            payload = self.receiving().take(chunk, self._take_timeout_s)
        except TransferFailed:
            self.drop(chunk)  # should it still come
            self._agree(False)
            return False
        if not self._agree(True):
            return False
        self.blocks.scatter(block_ids, payload)
        return True

    def drop(self, chunk: Chunk) -> None:
        self.receiving().drop(chunk)

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        self.receiving().expect(source, source_layout)

    def cancel(self, ticket_id: str) -> None:
        self.sending().cancel(ticket_id)

    def settle(self) -> None:
        """Followers call it after every operation. What they would report is not needed: a chunk that some rank
        lacks is found out when it is landed."""
        for end in (self.sender, self.receiver):
            if end is not None:
                end.poll()

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


class Mover:
    """What a pool role moves KV with. Lives at rank 0 and is called between two steps, from the engine's thread.

    Block ids are this worker's own, one per block of the chunk, in the chunk's order.
    """

    def __init__(self, dock: Dock[Any], tell: Tell) -> None:
        self._dock = dock
        self._tell = tell

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

    def push(self, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> None:
        """Copies the blocks and sends them to the ticket's destination. They may be freed once this returns."""
        assert len(block_ids) == chunk.num_blocks
        self._tell("push", ticket, chunk, tuple(block_ids))
        self._dock.push(ticket, chunk, block_ids)

    def land(self, chunk: Chunk, block_ids: Sequence[int]) -> bool:
        """Writes an arrived chunk into these blocks, on every rank or on none. False: some rank never got it, and
        the chunk is gone. The only call that may wait: for at most the dock's `take_timeout_s`."""
        assert len(block_ids) == chunk.num_blocks
        self._tell("land", chunk, tuple(block_ids))
        return self._dock.land(chunk, block_ids)

    def drop(self, chunk: Chunk) -> None:
        """Forgets an arrived chunk that nobody wants any more."""
        self._tell("drop", chunk)
        self._dock.drop(chunk)

    def expect(self, source: LaneAddress, source_layout: KVLayout) -> None:
        """Prepares the lane from `source`. To be called before the ticket leaves this worker."""
        self._tell("expect", source, source_layout)
        self._dock.expect(source, source_layout)

    def cancel(self, ticket_id: str) -> None:
        """Stops sending for a ticket."""
        self._tell("cancel", ticket_id)
        self._dock.cancel(ticket_id)

    def poll_sent(self) -> Sequence[Sent | LaneLost]:
        """What rank 0 has sent, and lost, since the last call."""
        return self._dock.sender.poll() if self._dock.sender else ()

    def poll_arrived(self) -> Sequence[Arrived | LaneLost]:
        """What has arrived at rank 0 since the last call. The other ranks' parts may be a moment behind."""
        return self._dock.receiver.poll() if self._dock.receiver else ()

    def busy(self) -> bool:
        """Is anything on its way at rank 0?"""
        return any(end.busy() for end in (self._dock.sender, self._dock.receiver) if end is not None)

    def lanes(self) -> Sequence[LaneStats]:
        return [lane for end in (self._dock.sender, self._dock.receiver) if end is not None for lane in end.lanes()]

    def close(self) -> None:
        """Closes rank 0's lanes; a follower closes its own when it is told to stop."""
        self._dock.close()
