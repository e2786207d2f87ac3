"""Keeps a copy of another process's block cache: numbered events, replay of missed ones, else snapshots.

    worker   EventLog.record(event) ... since(incarnation, next_seq) ──▶ KVEvents      snapshot(blocks) ──▶ KVEvents
    router   EventCursor.accept(KVEvents) ──▶ events to apply, or a Gap: request from there

An incarnation is one life of a worker; a later one is larger. Events of one life are numbered from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from protos.chain import Chain
from protos.values import BlockHash, BlockRemoved, BlockStored, Cleared, KVEvent, KVEvents, Tier


class EventLog:
    """The worker's side. Keeps the last `capacity` events for replay; older ones need a snapshot.

    Until they are read, events of one tier that continue a chain, and removals in a row, are merged into one event.
    """

    def __init__(self, incarnation: int, capacity: int = 4096) -> None:
        assert capacity > 0
        self.incarnation = incarnation
        self._ring: deque[KVEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._kind: type[BlockStored] | type[BlockRemoved] = BlockRemoved
        self._hashes: list[BlockHash] = []  # the event that may still grow
        self._parent: BlockHash = b""
        self._tier = Tier.DEVICE

    @property
    def next_seq(self) -> int:
        """Number of the next event; reading it ends the merging."""
        self._close()
        return self._next_seq

    def record(self, event: KVEvent) -> None:
        if isinstance(event, Cleared):
            self._close()
            self._append(event)
            return
        if isinstance(event, BlockStored):
            grows = self._kind is BlockStored and bool(self._hashes) and event.parent == self._hashes[-1]
        else:
            grows = self._kind is BlockRemoved
        if not (grows and event.tier is self._tier):
            self._close()
            self._kind, self._tier = type(event), event.tier
            self._parent = event.parent if isinstance(event, BlockStored) else b""
        self._hashes.extend(event.hashes)

    def since(self, incarnation: int, next_seq: int) -> KVEvents | None:
        """Events from number `next_seq` on, perhaps none; None if this log does not reach back so far."""
        end = self.next_seq
        first_kept = end - len(self._ring)
        if incarnation != self.incarnation or not first_kept <= next_seq <= end:
            return None
        events = tuple(islice(reversed(self._ring), end - next_seq))[::-1]
        return KVEvents(incarnation=self.incarnation, first_seq=next_seq, events=events)

    def snapshot(self, blocks: Iterable[BlockStored]) -> KVEvents:
        return KVEvents(incarnation=self.incarnation, first_seq=self.next_seq, events=tuple(blocks), snapshot=True)

    def _close(self) -> None:
        if not self._hashes:
            return
        hashes = Chain.of(self._hashes)  # packed: thousands of events are kept
        self._append(
            BlockStored(hashes=hashes, parent=self._parent, tier=self._tier)
            if self._kind is BlockStored
            else BlockRemoved(hashes=hashes, tier=self._tier)
        )
        self._hashes.clear()

    def _append(self, event: KVEvent) -> None:
        self._ring.append(event)
        self._next_seq += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Events were missed. Request those of `incarnation` from `next_seq` on from the worker."""

    incarnation: int
    next_seq: int


class EventCursor:
    """The reader's position in one worker's events, empty at first."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.next_seq = 0

    def accept(self, message: KVEvents) -> tuple[KVEvent, ...] | Gap:
        """The new events of a message, ready to be applied in order; they begin with Cleared if the message replaces
        the past.

        Messages of an earlier life and events seen before are dropped. After a Gap nothing has changed.
        """
        if message.incarnation < self.incarnation:
            return ()
        reborn = message.incarnation > self.incarnation
        expected = 0 if reborn else self.next_seq
        if message.snapshot:
            if not reborn and message.first_seq < expected:
                return ()
            self.incarnation, self.next_seq = message.incarnation, message.first_seq
            return (Cleared(), *message.events)
        if message.first_seq > expected:
            return Gap(incarnation=message.incarnation, next_seq=expected)
        num_known = expected - message.first_seq
        fresh = message.events[num_known:]
        self.incarnation, self.next_seq = message.incarnation, expected + len(fresh)
        return (Cleared(), *fresh) if reborn else fresh
