"""The ledger of tickets, on the side that receives KV: ownership of reserved blocks. Pure: time is an argument.

    reserve ──▶ RESERVED ── first block ──▶ SENDING ── last block ──▶ ARRIVED ── adopt ──▶ ADOPTED
                    │                          │                         │
                    ├──────── abort ───────────┼─────────────────────────┼──────────────▶ ABORTED
                    └──────── lease ends ──────┴─────────────────────────┴──────────────▶ EXPIRED

The ledger owns the blocks of the first three states. A lease bounds silence, not life: each block that lands renews it,
and so does each request for the same ticket, which its gateway repeats while the prompt waits for prefill. The end of a
ticket returns its blocks to the caller: to the request when it is adopted, to the pool otherwise. An ended ticket
leaves a tombstone, by which late messages are recognised. A generation fences: messages of an older generation are
dropped, and a newer one ends the older.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvtransfer.transport import Chunk
from protos.errors import TransferFailed
from protos.values import Ticket, TicketStats


class TicketState(StrEnum):
    RESERVED = "reserved"
    SENDING = "sending"
    ARRIVED = "arrived"
    ADOPTED = "adopted"
    ABORTED = "aborted"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A promise to hold blocks for KV. `cached_ids` are blocks of the destination's own cache, before those of the
    ticket: of each group of layers, one after the other, those from block `num_passed` on. Earlier ones lie behind its
    window.

    `token_ids` are the tokens whose KV the blocks hold in the end; if it `grows` while it moves they are the first of
    them, and there is room for more. `source` is the sender's `peer_name`. `in_smaller_blocks`: the source has them, so
    the first block of a window may come without positions that no later token reads.
    """

    ticket: Ticket
    source: str
    token_ids: tuple[int, ...]
    cached_ids: tuple[int, ...]
    reserved_s: float
    grows: bool = False
    num_passed: tuple[int, ...] = (0,)
    in_smaller_blocks: bool = False

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All blocks of the tokens: cached, then arriving."""
        return self.cached_ids + self.ticket.block_ids

    def tables(self) -> list[list[int]]:
        """For each group, its blocks from `num_passed` on, in order: cached, then arriving."""
        tables, begin = [], 0
        for start, passed, arriving in zip(self.ticket.starts, self.num_passed, self.ticket.tables(), strict=True):
            tables.append([*self.cached_ids[begin : begin + start - passed], *arriving])
            begin += start - passed
        return tables


def ticket_bytes(ticket: Ticket) -> int:
    """Bytes of the ticket's own blocks, in all layers and shares."""
    layout, tables = ticket.layout, ticket.tables()
    of_heads = len(tables[0]) * layout.head_bytes
    return of_heads + sum([len(table) * layout.page_bytes(group) for group, table in enumerate(tables)])


def _bits(layers: range) -> int:
    """One bit for each layer."""
    return (1 << layers.stop) - (1 << layers.start) if layers else 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A place is a group and an index into the ticket's table for it."""

    reservation: Reservation
    deadline_s: float
    arrived: set[tuple[int, int]] = field(default_factory=set)  # places with all their layers
    partial: dict[tuple[int, int], int] = field(default_factory=dict)  # of the others, the layers here, as bits

    @property
    def state(self) -> TicketState:
        num_blocks = len(self.reservation.ticket.block_ids)
        if len(self.arrived) == num_blocks:
            return TicketState.ARRIVED
        return TicketState.SENDING if self.arrived or self.partial else TicketState.RESERVED

    def all_layers(self, group: int) -> int:
        return _bits(range(len(self.reservation.ticket.layout.groups[group].layers)))

    def has(self, place: tuple[int, int], layers: int) -> bool:
        return place in self.arrived or self.partial.get(place, 0) & layers == layers

    def add(self, place: tuple[int, int], layers: int) -> None:
        here = self.partial.pop(place, 0) | layers
        if place in self.arrived or here == self.all_layers(place[0]):
            self.arrived.add(place)
        else:
            self.partial[place] = here

    def extend(self, now: float) -> None:
        self.deadline_s = now + self.reservation.ticket.lease_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """The record of an ended ticket. `generation` None: it was aborted before any reservation. `cause`: the error for a
    request that waits for the KV."""

    generation: int | None
    state: TicketState
    reason: str
    cause: type[TransferFailed] = TransferFailed


class Ledger:
    """The tickets of one destination. Not thread-safe: its owner also owns the block pool. `num_changes` counts tickets
    that began and ended."""

    def __init__(self, *, max_tombstones: int = 4096) -> None:
        self.num_changes = 0
        self._max_tombstones = max_tombstones
        self._live: dict[str, _Entry] = {}
        self._tombstones: OrderedDict[str, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        """Tickets that own blocks."""
        return len(self._live)

    # -- a ticket's life -----------------------------------------------------------------------------------------------

    def renew(self, ticket_id: str, generation: int, now: float) -> Reservation | None:
        """The live reservation of this generation, or None if it may be made now. The lease of a live one starts again
        at `now`. Raises TransferFailed when a newer generation has fenced this one, or it has ended. An older
        generation that is still live must be aborted before `reserve`."""
        entry = self._live.get(ticket_id)
        tombstone = self._tombstones.get(ticket_id)
        if tombstone is not None and tombstone.generation is None:
            raise TransferFailed(f"ticket {ticket_id} was {tombstone.state}: {tombstone.reason}")
        newest = entry.reservation.ticket.generation if entry else (tombstone and tombstone.generation) or 0
        if generation < newest:
            raise TransferFailed(
                f"ticket {ticket_id} is at generation {newest}: {generation} came too late", param="generation"
            )
        if entry is not None and generation == newest:
            entry.extend(now)
            return entry.reservation
        if tombstone is not None and generation == tombstone.generation:
            raise TransferFailed(
                f"ticket {ticket_id} generation {generation} was {tombstone.state} ({tombstone.reason}): reserve anew",
                param="generation",
            )
        return None

    def reserve(self, reservation: Reservation) -> None:
        """Takes a reservation: its blocks, and one reference to each cached block, belong to the ledger from here
        on."""
        ticket = reservation.ticket
        assert ticket.ticket_id not in self._live, f"ticket {ticket.ticket_id} is live already"
        self._tombstones.pop(ticket.ticket_id, None)
        self.num_changes += 1
        self._live[ticket.ticket_id] = _Entry(reservation, reservation.reserved_s + ticket.lease_s)

    def truncate(self, ticket_id: str, generation: int, stop: int) -> tuple[int, ...]:
        """The ticket is for the prompt's first `stop` blocks only: the others belong to the caller now."""
        entry = self._entry(ticket_id, generation)
        if entry is None:
            return ()
        reservation, ticket = entry.reservation, entry.reservation.ticket
        stop = max(stop, *ticket.starts)
        if ticket.stop <= stop:
            return ()
        num_left = [stop - start for start in ticket.starts]
        entry.reservation = replace(
            reservation,
            ticket=ticket.up_to(stop),
            token_ids=reservation.token_ids[: stop * ticket.layout.block_size],
        )
        entry.arrived = {place for place in entry.arrived if place[1] < num_left[place[0]]}
        entry.partial = {place: bits for place, bits in entry.partial.items() if place[1] < num_left[place[0]]}
        return tuple(
            [block_id for table, num in zip(ticket.tables(), num_left, strict=True) for block_id in table[num:]]
        )

    def forgo(self, ticket_id: str, generation: int, num_passed: Sequence[int]) -> None:
        """Stops waiting for the blocks of each group that its window has passed."""
        entry = self._entry(ticket_id, generation)
        if entry is not None:
            for group, (start, passed) in enumerate(zip(entry.reservation.ticket.starts, num_passed, strict=True)):
                for index in range(passed - start):
                    entry.add((group, index), entry.all_layers(group))

    def blocks_for(self, chunk: Chunk, source: str) -> tuple[int, ...]:
        """The blocks for an arrived chunk; empty if it must be dropped: the ticket is not live, or of another
        generation or source, or the chunk lies outside it or was landed before."""
        entry = self._entry(chunk.ticket_id, chunk.generation)
        if entry is None or entry.reservation.source != source or chunk.num_blocks < 1:
            return ()
        ticket, group = entry.reservation.ticket, chunk.group
        if group >= len(ticket.layout.groups):
            return ()
        indices = range(chunk.first_block, chunk.first_block + chunk.num_blocks)
        block_ids, layers = ticket.tables()[group], chunk.layers(ticket.layout)
        if indices.start < 0 or indices.stop > len(block_ids) or _bits(layers) & ~entry.all_layers(group) or not layers:
            return ()
        if all(entry.has((group, index), _bits(layers)) for index in indices):
            return ()
        return block_ids[indices.start : indices.stop]

    def landed(self, chunk: Chunk, now: float) -> None:
        """The blocks that `blocks_for` named hold the KV of the chunk's layers now. Progress extends the lease."""
        entry = self._entry(chunk.ticket_id, chunk.generation)
        assert entry is not None, f"a chunk of {chunk.ticket_id} was written without asking"
        layers = _bits(chunk.layers(entry.reservation.ticket.layout))
        for index in range(chunk.first_block, chunk.first_block + chunk.num_blocks):
            entry.add((chunk.group, index), layers)
        entry.extend(now)

    def adopt(self, ticket_id: str, generation: int) -> Reservation:
        """All of its blocks belong to the caller now. The ticket must have ARRIVED."""
        assert self.state(ticket_id, generation) is TicketState.ARRIVED, f"ticket {ticket_id} has not arrived"
        return self._end(ticket_id, TicketState.ADOPTED, "its request has the blocks")

    def abort(self, ticket_id: str, reason: str, generation: int | None = None) -> Reservation | None:
        """Ends a live ticket (of this generation, if given). Its blocks belong to the caller."""
        entry = self._live.get(ticket_id)
        if entry is None or generation not in (None, entry.reservation.ticket.generation):
            return None
        return self._end(ticket_id, TicketState.ABORTED, reason)

    def refuse(self, ticket_id: str, reason: str) -> None:
        """Refuses a later reservation of a ticket whose abort came first."""
        if ticket_id not in self._live and ticket_id not in self._tombstones:
            self._bury(ticket_id, Tombstone(generation=None, state=TicketState.ABORTED, reason=reason))

    def abort_source(
        self, source: str, reason: str, cause: type[TransferFailed] = TransferFailed
    ) -> Sequence[Reservation]:
        """Ends the tickets that `source` can no longer complete. Tickets whose KV has arrived completely stay."""
        doomed = [
            ticket_id
            for ticket_id, entry in self._live.items()
            if entry.reservation.source == source and entry.state is not TicketState.ARRIVED
        ]
        return [self._end(ticket_id, TicketState.ABORTED, reason, cause) for ticket_id in doomed]

    def expire(self, now: float) -> Sequence[Reservation]:
        """Ends every ticket whose lease is over."""
        late = [(ticket_id, entry) for ticket_id, entry in self._live.items() if entry.deadline_s <= now]
        return [
            self._end(
                ticket_id,
                TicketState.EXPIRED,
                f"no block arrived and no gateway renewed it for {entry.reservation.ticket.lease_s:g} s, "
                f"{len(entry.arrived)} of {len(entry.reservation.ticket.block_ids)} blocks were here",
            )
            for ticket_id, entry in late
        ]

    # -- what is known -------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float:
        """When the first lease ends unless it is renewed; infinity without a lease."""
        return min((entry.deadline_s for entry in self._live.values()), default=math.inf)

    def state(self, ticket_id: str, generation: int) -> TicketState | None:
        """The state of this generation of the ticket; None if it was never here, was fenced or ended long ago."""
        entry = self._entry(ticket_id, generation)
        if entry is not None:
            return entry.state
        tombstone = self.tombstone(ticket_id, generation)
        return tombstone.state if tombstone else None

    def reservation(self, ticket_id: str, generation: int) -> Reservation | None:
        entry = self._entry(ticket_id, generation)
        return entry.reservation if entry else None

    def tombstone(self, ticket_id: str, generation: int) -> Tombstone | None:
        tombstone = self._tombstones.get(ticket_id)
        return tombstone if tombstone and tombstone.generation == generation else None

    def ticket_ids(self) -> Collection[str]:
        return self._live.keys()

    def reserved_ids(self) -> list[int]:
        """Blocks held by live tickets, as often as they hold them."""
        return [block_id for entry in self._live.values() for block_id in entry.reservation.block_ids]

    def stats(self, now: float) -> tuple[TicketStats, ...]:
        """Statistics of each live ticket. `num_bytes`: the memory of its own blocks."""
        return tuple(
            TicketStats(
                ticket_id=ticket_id,
                generation=entry.reservation.ticket.generation,
                state=entry.state,
                owner=entry.reservation.source,
                age_s=now - entry.reservation.reserved_s,
                num_bytes=ticket_bytes(entry.reservation.ticket),
            )
            for ticket_id, entry in self._live.items()
        )

    def check_integrity(self) -> None:
        """A block that is written into has one owner; a ticket is live or buried; the tombstones are bounded."""
        written = [block_id for entry in self._live.values() for block_id in entry.reservation.ticket.block_ids]
        cached = {block_id for entry in self._live.values() for block_id in entry.reservation.cached_ids}
        assert len(written) == len(set(written)), "two tickets may write into one block"
        assert not cached & set(written), "a ticket may write into a cached block"
        assert not self._live.keys() & self._tombstones.keys(), "a live ticket is buried"
        assert len(self._tombstones) <= self._max_tombstones
        for ticket_id, entry in self._live.items():
            ticket = entry.reservation.ticket
            assert ticket.ticket_id == ticket_id
            known = entry.arrived | entry.partial.keys()
            tables = enumerate(ticket.tables())
            places = {(group, index) for group, table in tables for index in range(len(table))}
            assert known <= places, "a block arrived that was never asked for"
            assert not entry.arrived & entry.partial.keys(), "a block has arrived in full and in part"
            num_blocks = -(-len(entry.reservation.token_ids) // ticket.layout.block_size)
            num_held = sum(map(len, entry.reservation.tables()))
            assert num_held == len(entry.reservation.block_ids), "tables hold other blocks than the ticket"
            assert ticket.stop >= num_blocks, "a ticket holds less than its tokens need"
            assert ticket.stop == num_blocks or entry.reservation.grows, "a ticket holds more than its tokens need"

    def assert_idle(self) -> None:
        assert not self._live, f"tickets {sorted(self._live)} still own blocks"

    def _entry(self, ticket_id: str, generation: int) -> _Entry | None:
        entry = self._live.get(ticket_id)
        return entry if entry and entry.reservation.ticket.generation == generation else None

    def _end(
        self, ticket_id: str, state: TicketState, reason: str, cause: type[TransferFailed] = TransferFailed
    ) -> Reservation:
        reservation = self._live.pop(ticket_id).reservation
        self.num_changes += 1
        generation = reservation.ticket.generation
        self._bury(ticket_id, Tombstone(generation=generation, state=state, reason=reason, cause=cause))
        return reservation

    def _bury(self, ticket_id: str, tombstone: Tombstone) -> None:
        self._tombstones[ticket_id] = tombstone
        if len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)
