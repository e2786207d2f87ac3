"""The host tier: blocks that the device evicts are kept in host memory, and loaded back when a prompt begins with them.

    device   sealed ── evicted by allocate ───────▶ free ── allocate ──▶ being loaded ──▶ sealed
                │ retain: copied before that           ▲                     │
    host        └──▶ kept, in LRU order ── pinned ─────┴── onload ───────────┘

Ids, order and counts only; `HostCopies` moves the bytes. A block may be in both tiers: one that was loaded stays on the
host, so that it can leave the device again without being copied, and copies are made ahead of need, in batches of what
is evicted next. Slots that are being loaded are pinned: a pinned slot is not written.

Of a model with several groups of layers a slot has a page of one group, under the name that the device's has
(`workers.kv.block_pool.page_hash`). Events name those of group 0 only, and counts are in blocks: a page is a part of
one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from protos.values import BLOCK_HASH_BYTES, BlockHash, BlockRemoved, BlockStored, HostLoad, KVEvent, Tier, TierStats

_AHEAD = 16
_KEEP = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedOnload:
    """An onload is over: copying took `elapsed_s`."""

    load_id: int
    elapsed_s: float


class HostCopies(Protocol):
    """Copies blocks between the tiers, on every rank of a worker. The engine's thread calls, between two launches.

    No method waits for the device. Copies take place as if in the order of the calls and launches: a copy reads what
    the steps launched before it write, and no step launched after it overwrites what it still reads.
    """

    @property
    def blocks_per_s(self) -> float: ...

    def offload(self, block_ids: Sequence[int], slots: Sequence[int]) -> None: ...

    def onload(self, load_id: int, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Begins to copy slots into blocks, which must not be read or written before `await_copy`."""
        ...

    def finished(self) -> Sequence[FinishedOnload]:
        """Onloads that are over, each returned once, in the order in which they began."""
        ...

    def await_copy(self, load_id: int) -> None:
        """Makes steps launched from now on wait for the onload, so that they find its blocks written."""
        ...


class HostPool:
    """Decides which blocks are kept in `num_slots` slots. `record` gets every change, in order; a slot has one of a
    block's `num_groups` groups, of `block_bytes` over all ranks. Not thread-safe: it belongs to a `BlockPool`."""

    def __init__(
        self,
        num_slots: int,
        copies: HostCopies,
        record: Callable[[KVEvent], None],
        *,
        block_bytes: int,
        num_groups: int = 1,
    ) -> None:
        assert num_slots > 0
        self._num_groups = num_groups
        self.num_slots = num_slots
        self.copies = copies
        self._record = record
        self._block_bytes = block_bytes
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: OrderedDict[BlockHash, tuple[int, BlockHash]] = OrderedDict()  # slot and parent, oldest first
        self._pins: Counter[int] = Counter()
        self.headless: set[int] = set()
        """Slots of pages without the KV of the head that this worker keeps beside them (`BlockPool.headless`)."""
        self._orphans: set[int] = set()  # forgotten slots, free once unpinned
        self._speed = (0.0, 0.0)  # (blocks loaded, seconds); old ones count less
        self._num_stored = self._num_evicted = self._num_loaded = 0
        self._num_hit_tokens = self._num_passed_tokens = 0
        self._load_s = 0.0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._kept

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_ahead(self) -> int:
        """How many blocks to copy before they have to leave the device, once one has to be copied."""
        return min(_AHEAD, self.num_slots // 8)

    @property
    def blocks_per_s(self) -> float:
        num_blocks, seconds = self._speed
        return num_blocks / seconds if seconds > 0 else self.copies.blocks_per_s

    def entries(self) -> Mapping[BlockHash, BlockHash]:
        """Kept blocks of group 0 and their parents."""
        return {name: parent for name, (_, parent) in self._kept.items() if len(name) == BLOCK_HASH_BYTES}

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Slots of the chain's blocks up to the first that is not kept."""
        slots = []
        for block_hash in hashes:
            kept = self._kept.get(block_hash)
            if kept is None:
                break
            slots.append(kept[0])
        return slots

    def slot(self, name: BlockHash) -> int:
        return self._kept[name][0]

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt begins with this chain: its blocks are evicted last, tail before head."""
        for block_hash in reversed(hashes):
            if block_hash in self._kept:
                self._kept.move_to_end(block_hash)

    def retain(self, blocks: Sequence[tuple[int, BlockHash, BlockHash]], headless: Container[int] = ()) -> None:
        """Copies blocks of the device to the host, each with its hash and its parent's; the blocks to be evicted first
        come first, and are dropped first if there is no room. `headless` as in `BlockPool`."""
        room = self.num_slots - len(self._pins)
        blocks = blocks[max(0, len(blocks) - room) :]
        if not blocks:
            return
        slots = [self._take() for _ in blocks]
        self.copies.offload([block_id for block_id, _, _ in blocks], slots)
        self.headless.difference_update(slots)
        for (block_id, block_hash, parent), slot in zip(blocks, slots, strict=True):
            assert block_hash not in self._kept, "a block is kept twice"
            self._kept[block_hash] = (slot, parent)
            if block_id in headless:
                self.headless.add(slot)
        for _, block_hash, parent in reversed(blocks):
            if len(block_hash) == BLOCK_HASH_BYTES:
                self._record(BlockStored(hashes=(block_hash,), parent=parent, tier=Tier.HOST))
        self._num_stored += len(blocks)

    def pin(self, slots: Sequence[int]) -> None:
        self._pins.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                del self._pins[slot]
                if slot in self._orphans:
                    self._orphans.remove(slot)
                    self._free.append(slot)

    def clear(self) -> None:
        for slot, _ in self._kept.values():
            if slot in self._pins:
                self._orphans.add(slot)
            else:
                self._free.append(slot)
        self._kept.clear()

    # -- what it was good for ------------------------------------------------------------------------------------------

    def observe(self, num_blocks: int, elapsed_s: float) -> None:
        self._num_loaded += num_blocks
        self._load_s += elapsed_s
        self._speed = (self._speed[0] * _KEEP + num_blocks, self._speed[1] * _KEEP + elapsed_s)

    def hit(self, num_tokens: int) -> None:
        self._num_hit_tokens += num_tokens

    def recomputed(self, num_tokens: int) -> None:
        """Counts tokens that were on the host and were computed anyway."""
        self._num_passed_tokens += num_tokens

    def load(self) -> HostLoad:
        num_groups = self._num_groups
        return HostLoad(
            num_blocks=self.num_slots // num_groups,
            num_used=-(-(self.num_slots - len(self._free)) // num_groups),
            num_stored=self._num_stored // num_groups,
            num_evicted=self._num_evicted // num_groups,
            num_loaded=self._num_loaded // num_groups,
            num_hit_tokens=self._num_hit_tokens,
            num_passed_tokens=self._num_passed_tokens,
            stored_bytes=self._num_stored * self._block_bytes // num_groups,
            loaded_bytes=self._num_loaded * self._block_bytes // num_groups,
            load_s=self._load_s,
        )

    def tier(self) -> TierStats:
        return TierStats(
            tier="host",
            num_blocks=self.num_slots // self._num_groups,
            num_used=-(-len(self._pins) // self._num_groups),
            num_cached=len(self._kept) // self._num_groups,
            num_evicted=self._num_evicted // self._num_groups,
            num_loaded=self._num_loaded // self._num_groups,
            num_hit_tokens=self._num_hit_tokens,
        )

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every slot is in exactly one place, and no pinned slot is free."""
        kept = [slot for slot, _ in self._kept.values()]
        everywhere = [*self._free, *kept, *self._orphans]
        assert sorted(everywhere) == list(range(self.num_slots)), "a slot of the host is lost, or in two places"
        assert not self._pins.keys() & set(self._free), "a slot that is being loaded is free"
        assert self._orphans <= self._pins.keys(), "a slot without a block is not pinned"
        assert min(self._pins.values(), default=1) > 0

    def assert_idle(self) -> None:
        """Raises AssertionError while an onload is in progress."""
        self.check_integrity()
        assert not self._pins, f"slots {sorted(self._pins)} are still pinned"

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block_hash = next(kept_hash for kept_hash, (slot, _) in self._kept.items() if slot not in self._pins)
        slot, _ = self._kept.pop(block_hash)
        if len(block_hash) == BLOCK_HASH_BYTES:
            self._record(BlockRemoved(hashes=(block_hash,), tier=Tier.HOST))
        self._num_evicted += 1
        return slot


def eviction_candidates(
    evictable: Iterable[int],
    sealed: Callable[[int], tuple[BlockHash, BlockHash]],
    num_evicted: int,
    host: HostPool,
    unkept: Container[int] = (),
) -> list[tuple[int, BlockHash, BlockHash]]:
    """The blocks to copy before the first `num_evicted` evictable blocks are evicted: blocks without a copy on the
    host, and with them some that are evicted next. Blocks in `unkept` are not copied."""
    order = iter(evictable)
    leave = [(block_id, *sealed(block_id)) for block_id in islice(order, num_evicted) if block_id not in unkept]
    missing = [block for block in leave if block[1] not in host]
    if missing:
        ahead = [(block_id, *sealed(block_id)) for block_id in islice(order, host.num_ahead) if block_id not in unkept]
        missing += [block for block in ahead if block[1] not in host]
    return missing
