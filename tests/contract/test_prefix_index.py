"""Every PrefixIndex behaves like a dictionary of sets: random histories of events, against that dictionary.

Blocks form a tree, for a block's hash says what came before it, and events tell the truth about parents. Everything
else is arbitrary: blocks without their parents, parents removed before their children, events that repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.values import BlockHash, BlockRemoved, BlockStored, Cleared, KVEvent, Tier
from router.prefix.index import Match, PrefixIndex
from router.prefix.memory_index import MemoryPrefixIndex
from router.prefix.table_index import TablePrefixIndex

BACKENDS: list[Callable[[], PrefixIndex]] = [MemoryPrefixIndex, TablePrefixIndex]
WORKERS = ("p0", "p1", "d0")
BLOCKS = tuple(bytes([number + 1]) * 16 for number in range(6))
TWIGS = tuple(bytes([number + 101]) * 16 for number in range(3))
PATHS = (BLOCKS, (*BLOCKS[:2], *TWIGS[:2]), (*BLOCKS[:2], TWIGS[2]), (bytes([200]) * 16, bytes([201]) * 16))
PARENTS = {block: parent for path in PATHS for parent, block in zip((b"", *path), path, strict=False)}
QUERIES = ([], *(list(path) for path in PATHS), [*BLOCKS[:4], bytes([99]) * 16], list(BLOCKS[:3]))


class Naive:
    """The meaning of a prefix index, without any thought of speed."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, Tier], set[BlockHash]] = {(name, tier): set() for name in WORKERS for tier in Tier}
        self.until: dict[tuple[str, BlockHash], float] = {}

    def match(self, hashes: list[BlockHash], now: float) -> Match:
        near = {name: self._depth(hashes, self._near(name, now)) for name in WORKERS}
        anywhere = {name: self._depth(hashes, self._near(name, now) | self.held[name, Tier.HOST]) for name in WORKERS}
        return Match(
            blocks={name: depth for name, depth in anywhere.items() if depth},
            on_device={name: near[name] for name, depth in anywhere.items() if near[name] < depth},
        )

    def _depth(self, hashes: list[BlockHash], held: set[BlockHash]) -> int:
        return next((depth for depth, block in enumerate(hashes) if block not in held), len(hashes))

    def _near(self, name: str, now: float) -> set[BlockHash]:
        expected = {block for (worker, block), until in self.until.items() if worker == name and until > now}
        return self.held[name, Tier.DEVICE] | expected

    def num_blocks(self, name: str) -> int:
        return len(self.held[name, Tier.DEVICE] | self.held[name, Tier.HOST])

    def apply(self, worker: str, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self.held[worker, event.tier].update(event.hashes)
            case BlockRemoved():
                self.held[worker, event.tier].difference_update(event.hashes)
                for block in event.hashes if event.tier is Tier.DEVICE else ():
                    self.until.pop((worker, block), None)
            case Cleared():
                self.drop(worker)

    def drop(self, worker: str) -> None:
        for tier in Tier:
            self.held[worker, tier].clear()
        self.until = {key: until for key, until in self.until.items() if key[0] != worker}

    def expect(self, worker: str, hashes: tuple[BlockHash, ...], until: float) -> None:
        for block in hashes:
            self.until[worker, block] = max(until, self.until.get((worker, block), until))


tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    path = draw(st.sampled_from(PATHS))
    start = draw(st.integers(0, len(path) - 1))
    stop = draw(st.integers(start + 1, len(path)))
    return BlockStored(hashes=path[start:stop], parent=path[start - 1] if start else b"", tier=draw(tiers))


some = st.lists(st.sampled_from(sorted({block for path in PATHS for block in path})), max_size=4).map(tuple)
beginnings = st.sampled_from(PATHS).flatmap(lambda path: st.integers(1, len(path)).map(lambda stop: path[:stop]))
removed = st.builds(lambda hashes, tier: BlockRemoved(hashes=hashes, tier=tier), some, tiers)
events = st.one_of(stored(), removed, st.just(Cleared()))
workers = st.sampled_from(WORKERS)
steps = st.one_of(
    st.tuples(st.just("apply"), workers, st.lists(events, max_size=3).map(tuple)),
    st.tuples(st.just("drop"), workers, st.none()),
    st.tuples(st.just("expect"), workers, st.tuples(beginnings, st.integers(0, 8))),
    st.tuples(st.just("wait"), workers, st.integers(1, 4)),
)


@pytest.mark.parametrize("backend", BACKENDS)
@given(history=st.lists(steps, max_size=25))
def test_matches_equal_those_of_a_dictionary_of_sets(
    backend: Callable[[], PrefixIndex], history: list[tuple[str, str, Any]]
) -> None:
    index, naive, now = backend(), Naive(), 0.0
    for kind, worker, detail in history:
        if kind == "apply":
            index.apply(worker, detail)
            for event in detail:
                naive.apply(worker, event)
        elif kind == "drop":
            index.drop(worker)
            naive.drop(worker)
        elif kind == "expect":
            hashes, ahead = detail
            index.expect(worker, hashes, until=now + ahead)
            naive.expect(worker, hashes, now + ahead)
        else:
            now += detail
        for chain in QUERIES:
            assert index.match(chain, now=now) == naive.match(chain, now)
        for name in WORKERS:
            assert index.num_blocks(name) == naive.num_blocks(name)
            assert index.num_on_host(name) == len(naive.held[name, Tier.HOST])
        if isinstance(index, TablePrefixIndex):
            index.check_integrity()
    for name in WORKERS:
        for listed in index.blocks(name):
            assert [PARENTS[block] for block in listed.hashes] == [listed.parent, *listed.hashes[:-1]]
    copy = backend()
    for name in WORKERS:
        copy.apply(name, index.blocks(name))
        assert copy.num_blocks(name) == index.num_blocks(name)
    naive.until.clear()
    for chain in QUERIES:
        assert copy.match(chain, now=now) == naive.match(chain, now)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_counts_up_to_its_first_hole(backend: Callable[[], PrefixIndex]) -> None:
    index = backend()
    index.apply("p0", (BlockStored(hashes=BLOCKS),))
    index.apply("p1", (BlockStored(hashes=BLOCKS), BlockRemoved(hashes=(BLOCKS[2],))))
    index.apply("d0", (BlockStored(hashes=BLOCKS[1:], parent=BLOCKS[0]),))
    assert index.match(BLOCKS, now=0.0).blocks == {"p0": 6, "p1": 2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_siblings_find_a_prompt_before_its_worker_has_read_it(backend: Callable[[], PrefixIndex]) -> None:
    index = backend()
    index.expect("p0", BLOCKS[:3], until=2.0)
    assert index.match(BLOCKS, now=1.9).blocks == {"p0": 3}
    assert index.match(BLOCKS, now=2.0).blocks == {}
    index.expect("p0", BLOCKS[:3], until=4.0)
    index.apply("p0", (BlockStored(hashes=BLOCKS[:2]),))
    assert index.match(BLOCKS, now=5.0).blocks == {"p0": 2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_left_leaves_nothing_to_its_successor(backend: Callable[[], PrefixIndex]) -> None:
    index = backend()
    index.apply("p0", (BlockStored(hashes=BLOCKS),))
    index.expect("p0", BLOCKS, until=9.0)
    index.drop("p0")
    index.expect("p1", BLOCKS[:1], until=9.0)
    assert index.match(BLOCKS, now=1.0).blocks == {"p1": 1}
    assert index.num_blocks("p0") == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_counts_until_it_has_left_both_tiers(backend: Callable[[], PrefixIndex]) -> None:
    index = backend()
    index.apply("p0", (BlockStored(hashes=BLOCKS),))
    index.apply("p1", (BlockStored(hashes=BLOCKS),))
    index.apply("p1", (BlockStored(hashes=BLOCKS[2:], parent=BLOCKS[1], tier=Tier.HOST),))
    assert index.match(BLOCKS, now=0.0).on_device == {}
    index.apply("p1", (BlockRemoved(hashes=BLOCKS[3:]),))
    hits = index.match(BLOCKS, now=0.0)
    assert hits == Match({"p0": 6, "p1": 6}, {"p1": 3})
    assert (hits.num_on_device("p0"), hits.num_on_device("p1"), hits.num_on_device("d0")) == (6, 3, 0)
    index.apply("p1", (BlockRemoved(hashes=BLOCKS[5:], tier=Tier.HOST),))
    assert index.match(BLOCKS, now=0.0) == Match({"p0": 6, "p1": 5}, {"p1": 3})
    assert (index.num_blocks("p1"), index.num_on_host("p1")) == (5, 3)
    index.expect("p1", BLOCKS, until=1.0)
    assert index.match(BLOCKS, now=0.5) == Match({"p0": 6, "p1": 6}), "what is read is loaded"
    assert index.match(BLOCKS, now=1.0) == Match({"p0": 6, "p1": 5}, {"p1": 3})
    index.apply("p1", (Cleared(),))
    assert index.match(BLOCKS, now=1.0) == Match({"p0": 6})
