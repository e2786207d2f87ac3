"""Loads prefix blocks from the host tier while other requests are computed. Pure: no torch, no clock.

    begin: slots pinned, blocks taken ──▶ copying ── over, or needed now ──▶ done: blocks sealed, slots unpinned
                                             │                                 ├─▶ its request continues from there
                                             └── its request has gone ─────────┴─▶ blocks released

An onload always finishes: its blocks belong to it until it is done. They are cached even if its request has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protos.values import BlockHash
from workers.kv.block_pool import BlockPool, CachedPrefix, page_hash
from workers.scheduling.request import Onload, Request


class Onloads:
    """The onloads of one scheduler; without a host tier there are none."""

    def __init__(self, pool: BlockPool) -> None:
        self.prefill_tokens_per_s = 0.0
        self._pool = pool
        self._num_begun = 0
        self._copying: dict[int, Onload] = {}  # not done, in the order they began
        self._batch_slots: set[Request] = set()
        self._unmeasured: dict[int, int] = {}  # number of blocks by load id

    def __len__(self) -> int:
        """The number of onloads that are not done."""
        return len(self._copying)

    @property
    def num_batch_slots(self) -> int:
        """Slots of the batch reserved for requests whose blocks are being loaded."""
        return len(self._batch_slots)

    def prefix_savings(self, request: Request) -> int:
        """Tokens that a waiting request need not compute: loading, or cached when it arrived."""
        if request.onload is None:
            return request.prefix_savings
        return 0 if request.onload.done else request.onload.num_tokens

    def pin(self, hashes: Sequence[BlockHash], here: CachedPrefix) -> tuple[CachedPrefix, list[int]]:
        """The prefix of `hashes` that a request begins with, and the host slots of its pages that are not on the
        device. If computing is faster, returns the prefix on the device, `here`, without slots. Slots keep their
        content until they are loaded, or until `unpin`."""
        host = self._pool.host
        if host is None:
            return here, []
        found = self._pool.match_tiers(hashes, here)
        host.use(self._names(hashes, found))
        if not found.on_host or not self._is_worth(len(found.on_host), self._num_gained(found)):
            return here, []
        slots = [host.slot(page_hash(hashes[index], group)) for group, index in found.on_host]
        host.pin(slots)
        return found, slots

    def _names(self, hashes: Sequence[BlockHash], found: CachedPrefix) -> list[bytes]:
        """Names of a chain's pages that the host may keep: all pages of groups without a window, else those of the
        prefix."""
        if not self._pool.has_windows and len(found.num_passed) == 1:
            return list(hashes)
        windows = self._pool.windows.windows
        return [
            page_hash(block_hash, group)
            for index, block_hash in enumerate(hashes)
            for group, passed in enumerate(found.num_passed)
            if windows[group] is None or passed <= index < found.num_blocks
        ]

    def _num_gained(self, found: CachedPrefix) -> int:
        """Tokens that need not be computed if the pages on the host are loaded."""
        return (found.num_blocks - found.num_here) * self._pool.block_size

    def unpin(self, slots: Sequence[int]) -> None:
        if self._pool.host is not None:
            self._pool.host.unpin(slots)

    def begin(self, request: Request, prefix: CachedPrefix, slots: Sequence[int]) -> None:
        """Begins to load pinned slots into the request's pages of the prefix that were on the host."""
        block_ids = [request.tables[group][index] for group, index in prefix.on_host]
        load = self._copy(prefix, slots, block_ids, request.hashes)
        self._batch_slots.add(request)
        load.request, request.onload = request, load

    def _copy(
        self, prefix: CachedPrefix, slots: Sequence[int], block_ids: Sequence[int], hashes: Sequence[BlockHash]
    ) -> Onload:
        assert self._pool.host is not None
        load = Onload(
            load_id=self._num_begun,
            request=None,
            slots=slots,
            block_ids=block_ids,
            pages=prefix.on_host[: len(slots)],
            hashes=hashes,
            num_tokens=self._num_gained(prefix),
            num_clears=self._pool.num_clears,
        )
        self._num_begun += 1
        self._copying[load.load_id] = load
        pool, host = self._pool, self._pool.host
        if pool.head_stays or host.headless:
            of_slots = zip(slots, block_ids, strict=True)
            pool.headless.update([page for slot, page in of_slots if pool.head_stays or slot in host.headless])
        self._unmeasured[load.load_id] = len(slots)
        self._pool.host.copies.onload(load.load_id, load.slots, load.block_ids)
        return load

    def fetch(self, hashes: Sequence[BlockHash], num_computed: int, *, headroom: int, at_once: bool) -> Onload | None:
        """Begins to load the pages that the device lacks of those that a sequence with the KV of `num_computed` tokens
        of the chain reads, if there is room besides `headroom` blocks; without windows as far as there is room. None if
        there is nothing to load. `at_once`: no step is running, so the device may wait for it."""
        host, pool = self._pool.host, self._pool
        if host is None:
            return None
        if pool.has_groups:
            found = pool.match_read(hashes, num_computed, has=lambda name: pool.has(name) or name in host)
        else:
            found = pool.match_tiers(hashes, pool.match_prefix(hashes))
        if not found.on_host:
            return None
        host.use(self._names(hashes, found))
        held = found.held()
        pool.acquire(held)
        num_pages = min(len(found.on_host), max(0, pool.num_free - headroom * pool.windows.num_groups))
        if pool.has_groups and num_pages < len(found.on_host):
            num_pages = 0  # a part of a window is of no use
        slots = [host.slot(page_hash(hashes[index], group)) for group, index in found.on_host[:num_pages]]
        host.pin(slots)
        block_ids = pool.allocate(num_pages) if num_pages else None
        pool.release(held)
        if block_ids is None:
            return None
        load = self._copy(found, slots, block_ids, hashes)
        load.held = block_ids
        self.poll()  # a finished load does not report its time
        if at_once and not load.done:
            self._finish(load)
        return load

    def poll(self) -> None:
        host = self._pool.host
        if host is None or not self._unmeasured:
            return
        for loaded in host.copies.finished():
            host.observe(self._unmeasured.pop(loaded.load_id), loaded.elapsed_s)
            load = self._copying.get(loaded.load_id)
            if load is not None:
                self._finish(load)

    def finish_next(self) -> bool:
        """Finishes the oldest onload: the device waits for its copy. False without one."""
        load = next(iter(self._copying.values()), None)
        if load is not None:
            self._finish(load)
        return load is not None

    def start(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Records that the request begins to compute. Blocks of `hashes` after its start that are on the host count as
        recomputed."""
        num_loaded = 0 if request.onload is None else request.onload.num_tokens
        if request.num_preemptions == 0:
            self._pool.hit(request.num_computed - num_loaded)
        request.onload = None
        self._batch_slots.discard(request)
        if self._pool.host is not None:
            found = self._pool.match_tiers(hashes, self._pool.match_prefix(hashes))
            self._pool.host.recomputed(max(0, found.num_blocks * self._pool.block_size - request.num_computed))

    def drop(self, request: Request) -> bool:
        """Removes the request. True if its blocks are released later, when its onload is done."""
        load, request.onload = request.onload, None
        self._batch_slots.discard(request)
        if load is None or load.done:
            return False
        load.request = None
        load.held = [page for pages in request.held() for page in pages]
        return True

    def held_ids(self) -> Iterator[int]:
        return (block_id for load in self._copying.values() for block_id in load.held)

    def _is_worth(self, num_pages: int, num_tokens: int) -> bool:
        host, speed = self._pool.host, self.prefill_tokens_per_s
        assert host is not None
        num_before = sum(len(load.slots) for load in self._copying.values())
        if not speed or not host.blocks_per_s:
            return True
        return (num_before + num_pages) / host.blocks_per_s < num_tokens / speed

    def _finish(self, load: Onload) -> None:
        host = self._pool.host
        assert host is not None
        del self._copying[load.load_id]
        load.done = True
        host.copies.await_copy(load.load_id)
        host.unpin(load.slots)
        if load.num_clears == self._pool.num_clears:
            self._seal(load)
        request = load.request
        if request is None:
            self._pool.release(load.held)
            return
        host.hit(load.num_tokens)
        request.num_computed += load.num_tokens

    def _seal(self, load: Onload) -> None:
        start, pages = 0, load.pages
        for stop in range(1, len(pages) + 1):
            group, first = pages[start]
            if stop == len(pages) or pages[stop] != (group, first + stop - start):
                hashes = load.hashes[first : first + stop - start]
                parent = load.hashes[first - 1] if first else b""
                self._pool.seal_chain(load.block_ids[start:stop], hashes, parent, group)
                start = stop
