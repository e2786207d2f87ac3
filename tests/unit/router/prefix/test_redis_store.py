"""A gateway writes every event once, under its own number."""

from __future__ import annotations

from protos.values import BlockStored, KVEvent, KVEvents
from router.prefix.redis_store import _entries

EVENTS: tuple[KVEvent, ...] = tuple(BlockStored(hashes=(bytes([number]) * 16,)) for number in range(9))


def said(first: int, stop: int) -> KVEvents:
    return KVEvents(incarnation=3, first_seq=first, events=EVENTS[first:stop])


def written(*messages: KVEvents) -> dict[int, KVEvent]:
    """By number; each only once."""
    numbered = [(entry.first_seq + i, event) for entry in _entries(messages) for i, event in enumerate(entry.events)]
    assert len(numbered) == len(dict(numbered))
    return dict(numbered)


def test_repeated_events_are_written_once() -> None:
    expected = dict(enumerate(EVENTS[:6]))
    assert written(said(0, 2), said(0, 2), said(2, 6)) == expected
    assert written(said(0, 4), said(2, 6)) == expected
    assert written(said(0, 6), said(1, 3)) == expected


def test_another_gateways_events_keep_their_numbers() -> None:
    assert written(said(2, 4), said(6, 8)) == {number: EVENTS[number] for number in (2, 3, 6, 7)}
