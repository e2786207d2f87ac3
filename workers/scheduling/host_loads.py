"""Prompts that begin with blocks of the host tier: loaded while other requests are computed. Pure: no torch, no clock.

    begin: slots pinned, blocks taken ──▶ copying ── over, or needed now ──▶ settled: blocks sealed, slots unpinned
                                             │                                  ├─▶ its request goes on from there
                                             └── its request has gone ──────────┴─▶ blocks released

Blocks that another worker asks for are loaded in the same way, for no request: they are cached once they are here.

A load is never cut short: blocks it writes are nobody else's before it is settled. What it has brought is cached even
if nobody wants it any more.

Loading is worth it if it takes less time than computing: the blocks and those of loads before it, at the speed that
loads had so far, against their tokens, at the speed that prompts had (`prefill_tokens_per_s`, 0 while unknown: load).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protos.values import BlockHash
from workers.kv.blocks import BlockPool
from workers.scheduling.request import Request


@dataclass(slots=True, eq=False)
class Load:
    """`block_ids` and `hashes` are those on their way, `parent` the hash before them. `held` are blocks of a request
    that has gone meanwhile, or of a load that is for none."""

    load_id: int
    request: Request | None
    slots: Sequence[int]
    block_ids: Sequence[int]
    hashes: Sequence[BlockHash]
    parent: BlockHash
    num_clears: int
    held: list[int] = field(default_factory=list)
    settled: bool = False


class Loads:
    """Of one scheduler. Without a host tier there is never anything to load."""

    def __init__(self, pool: BlockPool) -> None:
        self.prefill_tokens_per_s = 0.0
        self._pool = pool
        self._num_begun = 0
        self._copying: dict[int, Load] = {}  # not settled, in the order they began
        self._seats: set[Request] = set()
        self._unmeasured: dict[int, int] = {}  # load id and number of blocks

    def __len__(self) -> int:
        """Loads under way."""
        return len(self._copying)

    @property
    def num_seats(self) -> int:
        """Requests that are to run once their blocks are here."""
        return len(self._seats)

    def num_on_host(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the chain's blocks are on the host, up to the first that is not."""
        return len(self._pool.host.match(hashes)) if self._pool.host is not None else 0

    def num_spared(self, request: Request) -> int:
        """Tokens that a waiting request does not compute itself: those on their way here, or cached when it came."""
        if request.load is None:
            return request.num_spared
        return 0 if request.load.settled else len(request.load.slots) * self._pool.block_size

    def pin(self, hashes: Sequence[BlockHash], num_matched: int) -> list[int]:
        """Slots to load for a request that may start from `hashes`, of which so many are on the device; none if
        computing is quicker. They stay what they are until they are loaded, or `unpin`."""
        host = self._pool.host
        if host is None:
            return []
        host.use(hashes)
        slots = host.match(hashes[num_matched:])
        if slots and not self._is_worth(len(slots)):
            return []
        host.pin(slots)
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        if self._pool.host is not None:
            self._pool.host.unpin(slots)

    def begin(self, request: Request, slots: Sequence[int]) -> None:
        """The request holds its blocks, the first of them computed, and pinned slots: the next are to come from
        these."""
        first = request.num_computed // self._pool.block_size
        parent = request.hashes[first - 1] if first else b""
        load = self._copy(slots, request.block_ids[first : first + len(slots)], request.hashes[first:], parent)
        self._seats.add(request)
        load.request, request.load = request, load

    def _copy(
        self, slots: Sequence[int], block_ids: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash
    ) -> Load:
        assert self._pool.host is not None
        load = Load(
            load_id=self._num_begun,
            request=None,
            slots=slots,
            block_ids=block_ids,
            hashes=hashes[: len(slots)],
            parent=parent,
            num_clears=self._pool.num_clears,
        )
        self._num_begun += 1
        self._copying[load.load_id] = load
        self._unmeasured[load.load_id] = len(slots)
        self._pool.host.copies.onload(load.load_id, load.slots, load.block_ids)
        return load

    def fetch(self, hashes: Sequence[BlockHash], *, headroom: int, at_once: bool) -> Load | None:
        """Begins to load what the host has of the chain after what the device has, as far as there is room besides
        `headroom` blocks: None if there is nothing to load. `at_once`: nobody computes, and the device may wait."""
        host, pool = self._pool.host, self._pool
        matched = pool.match(hashes)
        slots = host.match(hashes[len(matched) :]) if host is not None else []
        if host is None or not slots:
            return None
        host.use(hashes)
        pool.acquire(matched)
        slots = slots[: max(0, pool.num_free - headroom)]
        host.pin(slots)
        block_ids = pool.allocate(len(slots)) if slots else None
        pool.release(matched)
        if block_ids is None:
            return None
        first = len(matched)
        load = self._copy(slots, block_ids, hashes[first:], hashes[first - 1] if first else b"")
        load.held = block_ids
        self.poll()  # first: copies may have nothing more to tell of a load that was settled
        if at_once and not load.settled:
            self._settle(load)
        return load

    def poll(self) -> None:
        """Settles what is over."""
        host = self._pool.host
        if host is None or not self._unmeasured:
            return
        for loaded in host.copies.finished():
            host.observe(self._unmeasured.pop(loaded.load_id), loaded.elapsed_s)
            load = self._copying.get(loaded.load_id)
            if load is not None:
                self._settle(load)

    def settle_next(self) -> bool:
        """Settles the load that is over first, be it over or not: the device waits, nobody else does. False if there
        is none."""
        load = next(iter(self._copying.values()), None)
        if load is not None:
            self._settle(load)
        return load is not None

    def started(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """The request computes what follows, of `hashes` too."""
        num_loaded = 0 if request.load is None else len(request.load.slots) * self._pool.block_size
        if request.num_preemptions == 0:
            self._pool.hit(request.num_computed - num_loaded)
        request.load = None
        self._seats.discard(request)
        num_passed = self.num_on_host(hashes[request.num_computed // self._pool.block_size :])
        if num_passed and self._pool.host is not None:
            self._pool.host.recomputed(num_passed * self._pool.block_size)

    def forget(self, request: Request) -> bool:
        """The request goes. True if its blocks are released later, when its load is settled."""
        load, request.load = request.load, None
        self._seats.discard(request)
        if load is None or load.settled:
            return False
        load.request = None
        load.held = request.block_ids
        return True

    def held_ids(self) -> Iterator[int]:
        """References to blocks that loads hold for requests that have gone."""
        return (block_id for load in self._copying.values() for block_id in load.held)

    def _is_worth(self, num_blocks: int) -> bool:
        host, speed = self._pool.host, self.prefill_tokens_per_s
        assert host is not None
        num_before = sum(len(load.slots) for load in self._copying.values())
        if not speed or not host.blocks_per_s:
            return True
        return (num_before + num_blocks) / host.blocks_per_s < num_blocks * self._pool.block_size / speed

    def _settle(self, load: Load) -> None:
        host = self._pool.host
        assert host is not None
        del self._copying[load.load_id]
        load.settled = True
        host.copies.await_copy(load.load_id)
        host.unpin(load.slots)
        if load.num_clears == self._pool.num_clears:
            self._pool.seal_chain(load.block_ids, load.hashes, load.parent)
        request = load.request
        if request is None:
            self._pool.release(load.held)
            return
        num_tokens = len(load.slots) * self._pool.block_size
        host.hit(num_tokens)
        request.num_computed += num_tokens
