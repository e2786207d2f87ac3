"""The compiled tables say what plain Python says, with many workers, many blocks, and every order of eviction."""

from __future__ import annotations

import random

import pytest

from protos.errors import Internal
from protos.values import BlockHash, BlockRemoved, BlockStored, Cleared, Tier
from router.prefix import table_index
from router.prefix.index import PrefixIndex
from router.prefix.memory_index import MemoryPrefixIndex
from router.prefix.table_index import TablePrefixIndex

WORKERS = tuple(f"w{number}" for number in range(150))
HOSTED = WORKERS[::3]


def block(rng: random.Random) -> BlockHash:
    return rng.randbytes(16)


def conversations(rng: random.Random, num: int) -> list[list[BlockHash]]:
    """Chains with shared beginnings: system prompts, and turns that branch off."""
    chains = [[block(rng) for _ in range(3)] for _ in range(4)]
    while len(chains) < num:
        chain = rng.choice(chains)
        chains.append([*chain[: rng.randint(1, len(chain))], *(block(rng) for _ in range(rng.randint(1, 40)))])
    return chains


@pytest.mark.parametrize("seed", range(3))
def test_tables_and_dictionaries_agree(seed: int) -> None:
    rng = random.Random(seed)
    chains = conversations(rng, 120)
    ours: tuple[PrefixIndex, PrefixIndex] = (TablePrefixIndex(), MemoryPrefixIndex())
    now = 0.0
    for turn in range(3000):
        worker, chain = rng.choice(WORKERS), rng.choice(chains)
        kind = rng.random()
        cut = rng.randint(1, len(chain))
        removed = chain[cut - 1 :] if rng.random() < 0.7 else rng.sample(chain, min(3, len(chain)))
        until = now + rng.choice((1.0, 2.0, 5.0))
        tier = Tier.HOST if worker in HOSTED and rng.random() < 0.5 else Tier.DEVICE
        for index in ours:
            if kind < 0.55:
                index.apply(worker, (BlockStored(hashes=chain[:cut], tier=tier),))
            elif kind < 0.75:
                index.apply(worker, (BlockRemoved(hashes=removed, tier=tier),))
            elif kind < 0.95:
                index.expect(worker, chain[:cut], until=until)
            elif kind < 0.97:
                index.drop(worker)
            elif kind < 0.98:
                index.apply(worker, (Cleared(),))
        now += 0.01
        if turn % 5 == 0:
            asked = rng.choice(chains)
            assert ours[0].match(asked, now=now) == ours[1].match(asked, now=now)
    ours[0].check_integrity()  # type: ignore[attr-defined]
    for name in WORKERS:
        assert ours[0].num_blocks(name) == ours[1].num_blocks(name)
        assert ours[0].num_on_host(name) == ours[1].num_on_host(name)


def test_nothing_remains_of_workers_that_have_left() -> None:
    rng, index = random.Random(0), TablePrefixIndex()
    for chain in conversations(rng, 50):
        worker = rng.choice(WORKERS)
        index.apply(worker, (BlockStored(hashes=chain),))
        index.apply(worker, (BlockStored(hashes=chain[2:], parent=chain[1], tier=Tier.HOST),))
        index.expect(rng.choice(WORKERS), chain, until=9.0)
    for worker in WORKERS:
        index.drop(worker)
    index.check_integrity()
    assert index.num_entries == 0


def test_a_parent_with_very_many_children_may_go_before_them() -> None:
    """Beyond a bound the children are not counted any more: then the worker is walked, which is exact as well."""
    rng, index = random.Random(0), TablePrefixIndex()
    root, children = block(rng), [block(rng) for _ in range(5000)]
    index.apply("w", (BlockStored(hashes=(root,)), *(BlockStored(hashes=(child,), parent=root) for child in children)))
    index.apply("w", (BlockRemoved(hashes=(root,)),))
    index.apply("v", (BlockStored(hashes=(root, children[0])),))
    assert index.match([root, children[0]], now=0.0).blocks == {"v": 2}
    index.apply("w", (BlockRemoved(hashes=children[-4500:]),))
    assert index.match([root, children[0]], now=0.0).blocks == {"v": 2}, "others are left that nobody counted"
    index.apply("w", (BlockStored(hashes=(root,)),))
    assert index.match([root, children[7], block(rng)], now=0.0).blocks == {"w": 2, "v": 1}
    index.check_integrity()


def test_without_a_compiler_tables_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_index, "compiled", lambda: None)
    with pytest.raises(Internal, match="MemoryPrefixIndex"):
        TablePrefixIndex()
