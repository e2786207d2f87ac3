from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.hashing import chain_hashes
from protos.values import BlockRemoved, BlockStored, Cleared, KVEvent
from workers.kv.block_pool import BlockPool


def seal_all(pool: BlockPool, block_ids: list[int], hashes: Sequence[bytes]) -> None:
    parent = b""
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.seal(block_id, block_hash, parent)
        parent = block_hash


def cached(pool: BlockPool, num_blocks: int, first_token: int = 0) -> Sequence[bytes]:
    """Leaves a prefix of so many blocks in the cache."""
    size = pool.block_size
    hashes = chain_hashes(range(first_token, first_token + num_blocks * size), size)
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    seal_all(pool, block_ids, hashes)
    pool.release(block_ids)
    return hashes


def known_from(events: list[KVEvent]) -> set[bytes]:
    hashes: set[bytes] = set()
    for event in events:
        match event:
            case BlockStored():
                hashes |= set(event.hashes)
            case BlockRemoved():
                hashes -= set(event.hashes)
            case Cleared():
                hashes = set()
    return hashes


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(3) is not None
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(1) is not None


def test_a_released_prefix_survives_while_blocks_are_empty() -> None:
    pool = BlockPool(8, 4)
    hashes = cached(pool, 3)
    assert pool.num_free == 8
    other = pool.allocate(5)
    assert other is not None
    assert len(pool.match(hashes)) == 3
    assert pool.match([b"?" * 16, *hashes]) == []


def test_the_least_recently_used_prefix_goes_first_from_its_tail() -> None:
    pool = BlockPool(6, 4)
    old, young = cached(pool, 3), cached(pool, 3, first_token=100)
    again = pool.match(old[:2])  # the old one's head is used again
    pool.acquire(again)
    pool.release(again)
    pool.allocate(1)
    assert (len(pool.match(old)), len(pool.match(young))) == (2, 3)
    pool.allocate(2)
    assert (len(pool.match(old)), len(pool.match(young))) == (2, 1)


def test_a_block_that_is_in_use_is_never_handed_out() -> None:
    pool = BlockPool(4, 4)
    hashes = cached(pool, 3)
    held = pool.match(hashes)
    pool.acquire(held)
    assert pool.num_free == 1
    assert pool.allocate(2) is None
    pool.acquire(held)
    pool.release(held)
    assert pool.num_free == 1
    pool.release(held)
    assert pool.num_free == 4


def test_the_first_block_with_a_hash_stays_the_cached_one() -> None:
    events: list[KVEvent] = []
    pool = BlockPool(4, 4, events.append)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    pool.seal(first[0], b"a" * 16)
    pool.seal(second[0], b"a" * 16)
    assert pool.match([b"a" * 16]) == first
    assert events == [BlockStored(hashes=(b"a" * 16,))]
    pool.release(second)
    pool.release(first)
    assert pool.match([b"a" * 16]) == first
    pool.check_integrity()


def test_clearing_forgets_prefixes_and_takes_no_references() -> None:
    events: list[KVEvent] = []
    pool = BlockPool(4, 4, events.append)
    hashes = cached(pool, 3)
    held = pool.match(hashes[:1])
    pool.acquire(held)
    pool.clear()
    assert pool.match(hashes) == []
    assert pool.num_free == 3
    assert events[-1] == Cleared()
    pool.release(held)
    pool.assert_idle()


def test_a_snapshot_lists_parents_before_children() -> None:
    pool = BlockPool(16, 2)
    trunk = chain_hashes([1, 2, 3, 4], 2)
    branches = [trunk + chain_hashes([n, n, n, n], 2, parent=trunk[-1]) for n in (7, 8)]
    for hashes in branches:
        matched = pool.match(hashes)
        pool.acquire(matched)
        fresh = pool.allocate(4 - len(matched))
        assert fresh is not None
        for index, block_id in enumerate(fresh, len(matched)):
            pool.seal(block_id, hashes[index], hashes[index - 1] if index else b"")
    seen = {b""}
    for chain in pool.snapshot():
        assert chain.parent in seen
        seen |= set(chain.hashes)
    assert seen == {b"", *branches[0], *branches[1]}
    assert len(pool.snapshot()) == 2


def test_an_orphaned_block_is_in_the_snapshot() -> None:
    pool = BlockPool(3, 4)
    (head,), (tail,) = pool.allocate(1) or [], pool.allocate(1) or []
    pool.seal(head, b"h" * 16)
    pool.seal(tail, b"t" * 16, b"h" * 16)
    pool.release([head])
    pool.allocate(2)
    assert pool.snapshot() == (BlockStored(hashes=(b"t" * 16,), parent=b"h" * 16),)


def test_releasing_an_unowned_block_is_a_bug() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError):
        pool.release([0])
    with pytest.raises(AssertionError):
        pool.seal(0, b"a" * 16)
    assert pool.allocate(1)
    with pytest.raises(AssertionError, match="still held"):
        pool.assert_idle()


class PoolMachine(RuleBasedStateMachine):
    """Sequences over three families of prompts come, seal and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[KVEvent] = []
        self.pool = BlockPool(12, 2, self.events.append)
        self.held: list[list[int]] = []

    @rule(family=st.integers(0, 2), num_blocks=st.integers(1, 6), num_sealed=st.integers(0, 6))
    def come(self, family: int, num_blocks: int, num_sealed: int) -> None:
        hashes = chain_hashes([family] * 2 * num_blocks, 2)
        matched = self.pool.match(hashes)
        self.pool.acquire(matched)
        free = self.pool.num_free
        fresh = self.pool.allocate(num_blocks - len(matched))
        assert (fresh is None) == (free < num_blocks - len(matched))
        if fresh is None:
            self.pool.release(matched)
            return
        block_ids = matched + fresh
        for index in range(min(num_sealed, num_blocks)):
            self.pool.seal(block_ids[index], hashes[index], hashes[index - 1] if index else b"")
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity()
        for block_id in range(12):
            holders = sum(block_id in block_ids for block_ids in self.held)
            assert self.pool.num_references(block_id) == holders
        listed = [block_hash for chain in self.pool.snapshot() for block_hash in chain.hashes]
        assert len(listed) == len(set(listed)) == self.pool.num_cached
        assert known_from(self.events) == set(listed)

    def teardown(self) -> None:
        while self.held:
            self.pool.release(self.held.pop())
        self.pool.assert_idle()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=30)
