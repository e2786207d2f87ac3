"""The feed applies each event once, notices missing ones, and never mixes two lives of a worker."""

from __future__ import annotations

from protos.values import BlockRemoved, BlockStored, Hello, KVEvents, Tier
from router.prefix.feed import Feed
from router.prefix.index import Match
from router.prefix.memory_index import MemoryPrefixIndex

A, B, C = (bytes([number]) * 16 for number in range(3))


def stored(seq: int, *hashes: bytes, incarnation: int = 7, snapshot: bool = False) -> KVEvents:
    events = tuple(BlockStored(hashes=(block,)) for block in hashes)
    return KVEvents(incarnation=incarnation, first_seq=seq, events=events, snapshot=snapshot)


def feed() -> Feed:
    fed = Feed(MemoryPrefixIndex(), gateway_id="g")
    assert fed.hello("w", 7) == Hello(gateway_id="g", incarnation=0, next_seq=0)
    return fed


def test_events_are_applied_in_order_and_once() -> None:
    fed = feed()
    assert fed.receive("w", stored(0, A)) is None
    assert fed.receive("w", stored(0, A, B)) is None
    assert fed.index.match([A, B, C], now=0.0).blocks == {"w": 2}
    assert fed.hello("w", 7) == Hello(gateway_id="g", incarnation=7, next_seq=2)


def test_a_gap_is_asked_for_once_and_closed_by_a_snapshot() -> None:
    fed = feed()
    fed.receive("w", stored(0, A))
    assert fed.receive("w", stored(2, C)) == Hello(gateway_id="g", incarnation=7, next_seq=1)
    assert fed.receive("w", stored(3, C)) is None
    assert fed.index.match([A, B, C], now=0.0).blocks == {"w": 1}
    assert fed.receive("w", stored(4, A, B, C, snapshot=True)) is None
    assert fed.receive("w", stored(4)) is None
    assert fed.index.match([A, B, C], now=0.0).blocks == {"w": 3}
    assert fed.num_gaps == 1
    assert fed.receive("w", stored(9, A)) == Hello(gateway_id="g", incarnation=7, next_seq=4)


def test_a_new_life_of_a_worker_starts_empty() -> None:
    fed = feed()
    fed.receive("w", stored(0, A, B))
    assert fed.hello("w", 8) == Hello(gateway_id="g", incarnation=0, next_seq=0)
    assert fed.index.match([A, B], now=0.0).blocks == {}
    fed.receive("w", stored(0, A, incarnation=8))
    fed.receive("w", stored(2, B, incarnation=7))
    assert fed.index.match([A, B], now=0.0).blocks == {"w": 1}


def test_host_blocks_are_distinguished_from_device_blocks() -> None:
    fed = feed()
    moved = (
        BlockStored(hashes=(A, B)),
        BlockStored(hashes=(B, C), parent=A, tier=Tier.HOST),
        BlockRemoved(hashes=(B,)),
    )
    fed.receive("w", KVEvents(incarnation=7, first_seq=0, events=moved))
    assert fed.index.match([A, B, C], now=0.0) == Match({"w": 3}, {"w": 1})
    fed.receive("w", KVEvents(incarnation=7, first_seq=3, events=(BlockRemoved(hashes=(B,), tier=Tier.HOST),)))
    assert fed.index.match([A, B, C], now=0.0) == Match({"w": 1})
