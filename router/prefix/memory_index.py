"""The prefix index in one process's memory: per block and tier, a bit mask of the workers that hold it.

    bit of a worker     _slots["d0"] = 2                 a bit is given to the next worker once its own is gone
    who holds a block   _held[tier][hash] = 0b101        held by slots 0 and 2
    what a worker holds _blocks["d0"] = ({hash: parent}, {})   by tier, so that a worker's end costs its own blocks only

A match walks down the chain and keeps two masks: of workers that held every block so far, and of those that held them
all on the device. A block costs one look-up and one AND a mask; the number of workers does not matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from protos.chain import Chain
from protos.values import BlockHash, BlockRemoved, BlockStored, Cleared, KVEvent, Tier
from router.prefix.index import NONE, Match

Parents = dict[BlockHash, BlockHash]
_NOTHING: Mapping[Tier, Parents] = {tier: {} for tier in Tier}


class MemoryPrefixIndex:
    """`PrefixIndex` in plain Python: the definition of what table_index.py computes, and its substitute without a
    compiler."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._held: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in Tier}
        self._blocks: dict[str, dict[Tier, Parents]] = {}
        self._expected = _Expected()

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> Match:
        self._expected.expire(now)
        on_device, on_host, expected = self._held[Tier.DEVICE], self._held[Tier.HOST], self._expected.masks
        blocks: dict[str, int] = {}
        near: dict[str, int] = {}
        alive = alive_near = (1 << (max(self._names) + 1)) - 1 if self._names else 0
        for depth, block in enumerate(hashes):
            holders = on_device.get(block, 0)
            if expected:
                holders |= expected.get(block, 0)
            if on_host:
                self._note(near, alive_near & ~holders, depth)
                alive_near &= holders
                holders |= on_host.get(block, 0)
            gone = alive & ~holders
            if gone:
                self._note(blocks, gone, depth)
                alive &= holders
                if not alive:
                    break
        self._note(blocks, alive, len(hashes))
        if not on_host:
            return Match(blocks)
        self._note(near, alive_near, len(hashes))
        fewer = {name: near.get(name, 0) for name, depth in blocks.items() if near.get(name, 0) < depth}
        return Match(blocks, fewer or NONE)

    def _note(self, depths: dict[str, int], slots: int, depth: int) -> None:
        if depth:
            depths.update((self._names[slot], depth) for slot in _bits(slots))

    def apply(self, worker_id: str, events: Sequence[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._store(worker_id, event)
                case BlockRemoved():
                    self._remove(worker_id, event.hashes, event.tier)
                case Cleared():
                    self._clear(worker_id)

    def drop(self, worker_id: str) -> None:
        if worker_id not in self._slots:
            return
        self._clear(worker_id)
        del self._names[self._slots.pop(worker_id)]
        del self._blocks[worker_id]

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        self._expected.add(self._slot(worker_id), hashes, until)

    def num_blocks(self, worker_id: str) -> int:
        blocks = self._blocks.get(worker_id, _NOTHING)
        if not blocks[Tier.HOST]:
            return len(blocks[Tier.DEVICE])
        return len(blocks[Tier.DEVICE].keys() | blocks[Tier.HOST].keys())

    def num_on_host(self, worker_id: str) -> int:
        return len(self._blocks.get(worker_id, _NOTHING)[Tier.HOST])

    def blocks(self, worker_id: str) -> tuple[BlockStored, ...]:
        by_tier = self._blocks.get(worker_id, _NOTHING)
        return tuple(
            BlockStored(hashes=Chain.of(hashes), parent=parent, tier=tier)
            for tier, parents in by_tier.items()
            for parent, hashes in _chains(parents)
        )

    def _slot(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = next(free for free in range(len(self._names) + 1) if free not in self._names)
            self._slots[worker_id], self._names[slot] = slot, worker_id
            self._blocks[worker_id] = {tier: {} for tier in Tier}
        return slot

    def _store(self, worker_id: str, event: BlockStored) -> None:
        bit = 1 << self._slot(worker_id)
        held, blocks, parent = self._held[event.tier], self._blocks[worker_id][event.tier], event.parent
        for block in event.hashes:
            held[block] = held.get(block, 0) | bit
            blocks[block] = parent
            parent = block

    def _remove(self, worker_id: str, hashes: Iterable[BlockHash], tier: Tier) -> None:
        slot = self._slot(worker_id)
        blocks = self._blocks[worker_id][tier]
        for block in hashes:
            if tier is Tier.DEVICE:
                self._expected.remove(slot, block)
            if blocks.pop(block, None) is not None:
                self._unset(block, slot, tier)

    def _clear(self, worker_id: str) -> None:
        slot = self._slot(worker_id)
        for tier, blocks in self._blocks[worker_id].items():
            for block in blocks:
                self._unset(block, slot, tier)
            blocks.clear()
        self._expected.drop(slot)

    def _unset(self, block: BlockHash, slot: int, tier: Tier) -> None:
        held = self._held[tier]
        rest = held[block] & ~(1 << slot)
        if rest:
            held[block] = rest
        else:
            del held[block]


class _Expected:
    def __init__(self) -> None:
        self.masks: dict[BlockHash, int] = {}
        self._until: dict[tuple[int, BlockHash], float] = {}
        self._due: list[tuple[float, int, tuple[BlockHash, ...]]] = []

    def add(self, slot: int, hashes: Sequence[BlockHash], until: float) -> None:
        for block in hashes:
            self._until[slot, block] = max(until, self._until.get((slot, block), until))
            self.masks[block] = self.masks.get(block, 0) | (1 << slot)
        heapq.heappush(self._due, (until, slot, tuple(hashes)))

    def expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, slot, hashes = heapq.heappop(self._due)
            for block in hashes:
                if self._until.get((slot, block), now + 1.0) <= now:
                    self.remove(slot, block)

    def remove(self, slot: int, block: BlockHash) -> None:
        if self._until.pop((slot, block), None) is None:
            return
        rest = self.masks[block] & ~(1 << slot)
        if rest:
            self.masks[block] = rest
        else:
            del self.masks[block]

    def drop(self, slot: int) -> None:
        for block in [block for owner, block in self._until if owner == slot]:
            self.remove(slot, block)


def _chains(parents: Parents) -> list[tuple[BlockHash, list[BlockHash]]]:
    chains: list[tuple[BlockHash, list[BlockHash]]] = []
    seen: set[BlockHash] = set()
    for block in parents:
        path = []
        while block in parents and block not in seen:
            seen.add(block)
            path.append(block)
            block = parents[block]
        if path and chains and block == chains[-1][1][-1]:
            chains[-1][1].extend(reversed(path))
        elif path:
            chains.append((block, path[::-1]))
    return chains


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
