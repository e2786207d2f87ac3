"""Loads prefix blocks from the host tier while other requests are computed. Pure: no torch, no clock.

    begin: slots pinned, blocks taken ──▶ copying ── over, or needed now ──▶ done: blocks sealed, slots unpinned
                                             │                                 ├─▶ its request continues from there
                                             └── its request has gone ─────────┴─▶ blocks released

An onload for another worker (`fetch`) belongs to no request: its blocks are cached once they are on the device.

An onload always finishes: its blocks belong to it until it is done. They are cached even if its request has ended.

A request loads blocks if that takes less time than computing their tokens. The load waits for earlier onloads and has
their speed; computing has the speed of prompts (`prefill_tokens_per_s`). While that is unknown (0), the request loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protos.values import BlockHash
from workers.kv.blocks import BlockPool
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
        """Slots of the batch that are kept for requests whose blocks are being loaded."""
        return len(self._batch_slots)

    def num_on_host(self, hashes: Sequence[BlockHash]) -> int:
        """The number of the chain's leading blocks that are on the host."""
        return len(self._pool.host.match(hashes)) if self._pool.host is not None else 0

    def prefix_savings(self, request: Request) -> int:
        """Tokens that a waiting request need not compute: they are being loaded, or were cached when it arrived."""
        if request.onload is None:
            return request.prefix_savings
        return 0 if request.onload.done else len(request.onload.slots) * self._pool.block_size

    def pin(self, hashes: Sequence[BlockHash], num_matched: int) -> list[int]:
        """Host slots to load for a request that begins with `hashes`, of which `num_matched` are on the device; none if
        computing is quicker. They keep their content until they are loaded, or until `unpin`."""
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
        """Begins to load pinned slots into the request's blocks, from the first that is not computed."""
        first = request.num_computed // self._pool.block_size
        parent = request.hashes[first - 1] if first else b""
        load = self._copy(slots, request.block_ids[first : first + len(slots)], request.hashes[first:], parent)
        self._batch_slots.add(request)
        load.request, request.onload = request, load

    def _copy(
        self, slots: Sequence[int], block_ids: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash
    ) -> Onload:
        assert self._pool.host is not None
        load = Onload(
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

    def fetch(self, hashes: Sequence[BlockHash], *, headroom: int, at_once: bool) -> Onload | None:
        """Begins to load the chain's blocks that follow those on the device, as far as there is room besides `headroom`
        blocks. None if there is nothing to load. `at_once`: no step is running, so the device may wait for it."""
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
        self.poll()  # before it is done: afterwards its time is not reported
        if at_once and not load.done:
            self._finish(load)
        return load

    def poll(self) -> None:
        """Finishes onloads whose copies have ended."""
        host = self._pool.host
        if host is None or not self._unmeasured:
            return
        for loaded in host.copies.finished():
            host.observe(self._unmeasured.pop(loaded.load_id), loaded.elapsed_s)
            load = self._copying.get(loaded.load_id)
            if load is not None:
                self._finish(load)

    def finish_next(self) -> bool:
        """Finishes the onload that began first; the device waits for its copy. False if there is none."""
        load = next(iter(self._copying.values()), None)
        if load is not None:
            self._finish(load)
        return load is not None

    def start(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Records that the request begins to compute. Blocks of `hashes` after its start that are on the host count as
        recomputed."""
        num_loaded = 0 if request.onload is None else len(request.onload.slots) * self._pool.block_size
        if request.num_preemptions == 0:
            self._pool.hit(request.num_computed - num_loaded)
        request.onload = None
        self._batch_slots.discard(request)
        num_recomputed = self.num_on_host(hashes[request.num_computed // self._pool.block_size :])
        if num_recomputed and self._pool.host is not None:
            self._pool.host.recomputed(num_recomputed * self._pool.block_size)

    def drop(self, request: Request) -> bool:
        """Removes the request. True if its blocks are released later, when its onload is done."""
        load, request.onload = request.onload, None
        self._batch_slots.discard(request)
        if load is None or load.done:
            return False
        load.request = None
        load.held = request.block_ids
        return True

    def held_ids(self) -> Iterator[int]:
        """The blocks that onloads hold for ended requests."""
        return (block_id for load in self._copying.values() for block_id in load.held)

    def _is_worth(self, num_blocks: int) -> bool:
        host, speed = self._pool.host, self.prefill_tokens_per_s
        assert host is not None
        num_before = sum(len(load.slots) for load in self._copying.values())
        if not speed or not host.blocks_per_s:
            return True
        return (num_before + num_blocks) / host.blocks_per_s < num_blocks * self._pool.block_size / speed

    def _finish(self, load: Onload) -> None:
        host = self._pool.host
        assert host is not None
        del self._copying[load.load_id]
        load.done = True
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
