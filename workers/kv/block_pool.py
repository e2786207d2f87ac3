"""Ownership of KV blocks: ids and reference counts only; the tensors are elsewhere.

Every block is in one of three places, and only a block without references may be handed out again::

    free ── allocate ──▶ referenced ── last release ──▶ free, or, if sealed, evictable (a cached prefix, in LRU order)
      ▲                      ▲                              │
      │                      └────────── acquire ───────────┤
      └──────────────── evicted by allocate ◀───────────────┘

A sealed block has a hash: it is full, computed, and can serve any request whose tokens up to there are the same. With a
host tier (`workers.kv.host`) an evicted block is copied there first.

Several groups of layers share one pool: an id is then a page, `block_size` positions of one group's layers. It is
cached under the block's hash and the group's number. A sequence has a table of ids for each group. Events name the
blocks of group 0 only: an index counts those as cached, and a prompt finds less where other groups' pages are gone.
The host tier keeps pages under the same names. Of a window it keeps those that a prompt reads which begins with all of
a sequence, with its prompt, or where another one has begun: most pages only slide through a window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kvtransfer.windows import PageWindows
from protos.values import (
    BLOCK_HASH_BYTES,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Cleared,
    KVEvent,
    Tier,
    TierStats,
)
from workers.kv.host import HostPool, eviction_candidates

PASSED = 0
"""The entry of a table in place of a page that was given back: no token reads it any more."""
ON_HOST = -1
"""The entry of a found prefix's table whose page is on the host only."""


@lru_cache(maxsize=8)
def _ids(num_blocks: int) -> tuple[int, ...]:
    """The last first. A simulated cluster has a thousand pools of a size: they share the numbers."""
    return tuple(range(num_blocks - 1, -1, -1))


def page_hash(block_hash: BlockHash, group: int) -> bytes:
    """The hash under which a group's page of a block is cached."""
    return block_hash + bytes((group,)) if group else block_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The longest cached prefix of a chain: `num_blocks` blocks, with the pages of each group that later tokens read.
    Before those, `num_passed` entries of a group's table are `PASSED`. If group 0 has no window, its first
    `num_leading` blocks are cached, perhaps more than the prefix. `on_host`: group and index of each entry that is
    `ON_HOST`; without those pages the prefix has `num_here` blocks."""

    num_blocks: int
    num_leading: int
    tables: Sequence[list[int]]
    num_passed: Sequence[int]
    num_here: int
    on_host: Sequence[tuple[int, int]] = ()

    def held(self) -> list[int]:
        pages = [
            page
            for table, passed in zip(self.tables, self.num_passed, strict=True)
            for page in (table[passed:] if passed else table)
        ]
        return [page for page in pages if page != ON_HOST] if self.on_host else pages


class BlockPool:
    """`windows` are those of the groups. `record` is called with every change to the set of sealed blocks, in order;
    `host`, if any, must record to the same. `num_clears` counts calls of `clear`. Not thread-safe: it has one owner."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        record: Callable[[KVEvent], None] = lambda event: None,
        *,
        host: HostPool | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.windows = PageWindows(block_size=block_size, windows=tuple(windows))
        self.has_windows = any(window is not None for window in windows)
        self.has_groups = tuple(windows) != (None,)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = host
        self.num_clears = 0
        self._num_evicted = 0
        self._num_hit_tokens = 0
        self._record = record
        self._refs = [0] * num_blocks
        self._free = list(_ids(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._hashes: list[BlockHash | None] = [None] * num_blocks  # of sealed blocks
        self._parents: list[BlockHash] = [b""] * num_blocks  # of those
        self._reused: set[int] = set()  # cached pages that a prompt has begun with
        self._slid: set[int] = set()  # given back behind a window, and not reused
        self.headless: set[int] = set()
        """Pages without the KV of the head that this worker keeps beside them: they came from a worker that has another
        one, or were computed while the head was paused."""
        self.head_stays = False
        """Whether no page from elsewhere comes with that KV (`kvtransfer.reshard.can_move_head`)."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now: the empty and the evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._by_hash)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_spare(self, num_blocks: int) -> bool:
        """Whether this many blocks are free and the host tier need not keep any of them."""
        return num_blocks <= (self.num_free if self.host is None else len(self._free))

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest cached prefix of a chain. Takes no references: `acquire` does."""
        matched: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def has(self, name: bytes) -> bool:
        return name in self._by_hash

    def match_prefix(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """The longest n of which the blocks [0, n) of groups without a window are cached, and of each window the pages
        that position n * block_size and later ones read. Takes no references."""
        if not self.has_groups:
            matched = self.match(hashes)
            num = len(matched)
            return CachedPrefix(
                num_blocks=num, num_leading=num, num_here=num, tables=(matched,), num_passed=_NONE_PASSED
            )
        return self._match_groups(hashes, self._by_hash.__contains__)

    def match_tiers(self, hashes: Sequence[BlockHash], here: CachedPrefix) -> CachedPrefix:
        """The longest prefix with pages of both tiers; `here` is what `match_prefix` has found. Takes no references."""
        host = self.host
        if host is None:
            return here
        if self.has_groups:
            matched = self._match_groups(hashes, lambda name: name in self._by_hash or name in host)
            return replace(matched, num_here=here.num_blocks)
        first = here.num_blocks
        stop = first + len(host.match(hashes[first:]))
        return CachedPrefix(
            num_blocks=stop,
            num_leading=stop,
            num_here=first,
            tables=([*here.tables[0], *[ON_HOST] * (stop - first)],),
            num_passed=_NONE_PASSED,
            on_host=[(0, index) for index in range(first, stop)],
        )

    def match_read(
        self, hashes: Sequence[BlockHash], num_computed: int, *, has: Callable[[bytes], bool] | None = None
    ) -> CachedPrefix:
        """Returns the longest n of which all blocks are cached that a sequence with the KV of `num_computed` tokens
        still reads. Unlike `match_prefix` it ignores the blocks that the token after these n blocks reads. Pages for
        which `has` is true count as cached; their entries are `ON_HOST`. Takes no references."""
        if has is None:
            if not self.has_groups:
                return self.match_prefix(hashes)
            has = self._by_hash.__contains__
        num_passed = self.windows.num_passed(num_computed)
        num_blocks = num_leading = self._num_leading(hashes, has)
        for group, passed in enumerate(num_passed):
            if self.windows.windows[group] is not None:
                absent = (i for i in range(passed, num_blocks) if not has(page_hash(hashes[i], group)))
                num_blocks = next(absent, num_blocks)
        if num_blocks <= min(num_passed):
            num_blocks = 0  # nothing was found
        return self._prefix(hashes, num_blocks, num_leading, num_passed)

    def _match_groups(self, hashes: Sequence[BlockHash], has: Callable[[bytes], bool]) -> CachedPrefix:
        num_leading = num_blocks = self._num_leading(hashes, has)
        while num_blocks:
            missing = self._last_missing(hashes, num_blocks, has)
            if missing is None:
                break
            num_blocks = missing
        if None not in self.windows.windows:
            num_leading = num_blocks  # blocks that another sequence computes now are worth waiting for
        num_passed = self.windows.num_passed(num_blocks * self.block_size)
        return self._prefix(hashes, num_blocks, max(num_leading, num_blocks), num_passed)

    def _prefix(
        self, hashes: Sequence[BlockHash], num_blocks: int, num_leading: int, num_passed: Sequence[int]
    ) -> CachedPrefix:
        cached = self._by_hash
        tables = [
            [PASSED] * passed
            + [cached.get(page_hash(block_hash, group), ON_HOST) for block_hash in hashes[passed:num_blocks]]
            for group, passed in enumerate(num_passed)
        ]
        on_host = [
            (group, index) for group, table in enumerate(tables) for index, page in enumerate(table) if page == ON_HOST
        ]
        num_here = min([index for _, index in on_host], default=num_blocks)
        return CachedPrefix(
            num_blocks=num_blocks,
            num_leading=num_leading,
            num_here=num_here,
            tables=tables,
            num_passed=num_passed,
            on_host=on_host,
        )

    def _num_leading(self, hashes: Sequence[BlockHash], has: Callable[[bytes], bool]) -> int:
        """Counts leading blocks whose pages are cached in every group without a window; all, if each group has a
        window."""
        num_blocks = len(hashes)
        for group, window in enumerate(self.windows.windows):
            if window is None:
                absent = (index for index in range(num_blocks) if not has(page_hash(hashes[index], group)))
                num_blocks = next(absent, num_blocks)
        return num_blocks

    def _last_missing(self, hashes: Sequence[BlockHash], num_blocks: int, has: Callable[[bytes], bool]) -> int | None:
        """Returns the last block whose page the token after `num_blocks` blocks would read and which is missing. No
        longer prefix without that block can be used: its window would begin earlier or at the same page."""
        last = -1
        for group, passed in enumerate(self.windows.num_passed(num_blocks * self.block_size)):
            if self.windows.windows[group] is not None:
                needed = range(num_blocks - 1, max(passed - 1, last), -1)
                missing = (index for index in needed if not has(page_hash(hashes[index], group)))
                last = max(last, next(missing, -1))
        return None if last < 0 else last

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each of these blocks, which are cached or referenced already."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._evictable[block_id]
            self._refs[block_id] += 1
        if self.host is not None and self.has_windows:
            self._reused.update(block_ids)
            self._slid.difference_update(block_ids)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with undefined content, one reference each; None, and nothing changed, if there are too few.

        Empty blocks first, then cached ones, the least recently used first.
        """
        if num_blocks > self.num_free:
            return None
        num_evicted = max(0, num_blocks - len(self._free))
        if num_evicted and self.host is not None:
            leaving = eviction_candidates(self._evictable, self._sealed, num_evicted, self.host, self._slid)
            self.host.retain(leaving, self.headless)
        self._num_evicted += num_evicted
        if num_evicted:
            self._evict(num_evicted)
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._refs[block_id] = 1
        if self.headless:
            self.headless.difference_update(block_ids)
        return block_ids

    def seal(self, block_id: int, block_hash: BlockHash, parent: BlockHash = b"") -> None:
        """Seals a referenced block: from now on it is cached under this hash. `parent` is b"" for a prompt's first
        block.

        If another block has the hash already, that block stays the cached one, and this one is not cached.
        """
        self.seal_chain((block_id,), (block_hash,), parent)

    def seal_chain(
        self, block_ids: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash = b"", group: int = 0
    ) -> None:
        """Seals consecutive blocks of a group; `parent` precedes the first one."""
        begun, fresh = parent, list[BlockHash]()
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            assert self._refs[block_id] > 0, f"block {block_id} is sealed and has no reference"
            name = page_hash(block_hash, group) if group else block_hash
            if name not in self._by_hash:
                assert self._hashes[block_id] is None, f"block {block_id} was sealed twice, with different hashes"
                self._by_hash[name] = block_id
                self._hashes[block_id], self._parents[block_id] = name, parent
                fresh.append(block_hash)
            else:
                self._stored(fresh, begun, group)
                begun, fresh = block_hash, []
            parent = block_hash
        self._stored(fresh, begun, group)

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes one reference from each block of a sequence, given in its order: its tail is evicted first."""
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, f"block {block_id} is released and has no reference"
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                if self._hashes[block_id] is not None:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def slide(self, pages: Iterable[int]) -> None:
        """Records pages that a running sequence's window has passed. No prompt is expected to begin there, so the host
        does not keep them, unless a prompt has begun there or `keep` is called."""
        self._slid.update([page for page in pages if page in self._evictable and page not in self._reused])

    def keep(self, names: Iterable[bytes]) -> None:
        """A prompt may begin with these pages."""
        self._slid.difference_update([self._by_hash[name] for name in names if name in self._by_hash])

    def clear(self) -> None:
        """Drops every cached prefix, on the host too. Referenced blocks stay."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        self._parents = [b""] * self.num_blocks
        self._reused.clear()
        self._slid.clear()
        if self.host is not None:
            self.host.clear()
        self.num_clears += 1
        self._record(Cleared())

    def snapshot(self) -> tuple[BlockStored, ...]:
        """All cached blocks of each tier as chains, every parent before its children."""
        first_group = [page for name, page in self._by_hash.items() if len(name) == BLOCK_HASH_BYTES]
        chains = _chains(dict(map(self._sealed, first_group)), Tier.DEVICE)
        return chains if self.host is None else chains + _chains(self.host.entries(), Tier.HOST)

    def hit(self, num_tokens: int) -> None:
        self._num_hit_tokens += num_tokens

    def tiers(self) -> tuple[TierStats, ...]:
        """Counts in blocks of all groups: a page is a part of one."""
        num_groups = self.windows.num_groups
        device = TierStats(
            tier="device",
            num_blocks=self.num_blocks // num_groups,
            num_used=-(-(self.num_blocks - self.num_free) // num_groups),
            num_cached=self.num_cached // num_groups,
            num_evicted=self._num_evicted // num_groups,
            num_hit_tokens=self._num_hit_tokens,
        )
        return (device,) if self.host is None else (device, self.host.tier())

    def hash_of(self, block_id: int) -> BlockHash | None:
        return self._hashes[block_id]

    def num_references(self, block_id: int) -> int:
        return self._refs[block_id]

    def check_balance(self, num_references: int) -> None:
        """Checks that references equal those of their holders, and that all blocks are accounted for. Cheap enough for
        every event."""
        counted, num_unheld = sum(self._refs), self._refs.count(0)
        assert counted == num_references, f"there are {counted} references, their holders know of {num_references}"
        num_free = len(self._free) + len(self._evictable)
        assert num_free == num_unheld, f"{num_unheld} blocks have no reference, {num_free} can be handed out"

    def check_integrity(self) -> None:
        """Checks that every block is in exactly one place, and that the index of hashes is one to one."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        referenced = {block_id for block_id, refs in enumerate(self._refs) if refs > 0}
        assert min(self._refs) >= 0
        assert not free & evictable
        assert not referenced & (free | evictable), "a block is held and handed out"
        assert len(free) + len(evictable) + len(referenced) == self.num_blocks, "a block is lost"
        sealed = {block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert not free & sealed, "a sealed block is free"
        assert evictable <= sealed, "an evictable block has no hash"
        assert {self._hashes[block_id]: block_id for block_id in sealed} == self._by_hash
        if self.host is not None:
            self.host.check_integrity()

    def assert_idle(self) -> None:
        """Raises AssertionError while a block is referenced."""
        self.check_integrity()
        held = [block_id for block_id, refs in enumerate(self._refs) if refs]
        assert not held, f"blocks {held} are still held"
        if self.host is not None:
            self.host.assert_idle()

    def _sealed(self, block_id: int) -> tuple[BlockHash, BlockHash]:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        return block_hash, self._parents[block_id]

    def _stored(self, hashes: Sequence[BlockHash], parent: BlockHash, group: int) -> None:
        if hashes and not group:
            self._record(BlockStored(hashes=tuple(hashes), parent=parent))

    def _evict(self, num_blocks: int) -> None:
        removed: list[BlockHash] = []
        for _ in range(num_blocks):
            block_id, _ = self._evictable.popitem(last=False)
            block_hash, _ = self._sealed(block_id)
            self._hashes[block_id], self._parents[block_id] = None, b""
            del self._by_hash[block_hash]
            if len(block_hash) == BLOCK_HASH_BYTES:  # of group 0
                removed.append(block_hash)
            self._free.append(block_id)
            self._reused.discard(block_id)
            self._slid.discard(block_id)
        if removed:
            self._record(BlockRemoved(hashes=tuple(removed)))


_NONE_PASSED = (0,)


def _chains(parents: Mapping[BlockHash, BlockHash], tier: Tier) -> tuple[BlockStored, ...]:
    children: dict[BlockHash, list[BlockHash]] = {}
    heads: list[tuple[BlockHash, BlockHash]] = []
    for block_hash, parent in parents.items():
        if parent in parents:
            children.setdefault(parent, []).append(block_hash)
        else:
            heads.append((block_hash, parent))
    chains: list[BlockStored] = []
    while heads:
        block_hash, parent = heads.pop()
        chain = [block_hash]
        while following := children.get(chain[-1]):
            heads.extend((sibling, chain[-1]) for sibling in following[1:])
            chain.append(following[0])
        chains.append(BlockStored(hashes=tuple(chain), parent=parent, tier=tier))
    return tuple(chains)
