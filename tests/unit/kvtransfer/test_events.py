from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.events import EventCursor, EventLog, Gap
from protos.values import BlockRemoved, BlockStored, Cleared, KVEvent, KVEvents, Tier


def h(number: int) -> bytes:
    return bytes([number]) * 16


def stored(*numbers: int, parent: int | None = None) -> BlockStored:
    return BlockStored(hashes=tuple(h(n) for n in numbers), parent=b"" if parent is None else h(parent))


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(hashes=tuple(h(n) for n in numbers))


def log_of(*events: KVEvent, capacity: int = 100) -> EventLog:
    """A log in which no events were merged."""
    log = EventLog(incarnation=7, capacity=capacity)
    for event in events:
        log.record(event)
        assert log.next_seq
    return log


def apply(known: set[bytes], events: tuple[KVEvent, ...]) -> set[bytes]:
    for event in events:
        if isinstance(event, Cleared):
            known = set()
        elif isinstance(event, BlockStored):
            known = known | set(event.hashes)
        else:
            known = known - set(event.hashes)
    return known


class TestLog:
    def test_events_are_numbered_from_zero_and_can_be_replayed(self) -> None:
        log = log_of(stored(1), removed(1), Cleared())
        assert log.since(7, 0) == KVEvents(incarnation=7, first_seq=0, events=(stored(1), removed(1), Cleared()))
        assert log.since(7, 2) == KVEvents(incarnation=7, first_seq=2, events=(Cleared(),))
        assert log.since(7, 3) == KVEvents(incarnation=7, first_seq=3, events=())

    def test_chains_and_removals_in_a_row_become_one_event(self) -> None:
        log = EventLog(incarnation=7)
        for event in (stored(1), stored(2, parent=1), stored(3, 4, parent=2), stored(9), removed(5), removed(6)):
            log.record(event)
        events = log.since(7, 0)
        assert events is not None
        assert events.events == (stored(1, 2, 3, 4), stored(9), removed(5, 6))

    def test_events_of_two_tiers_stay_apart(self) -> None:
        log = EventLog(incarnation=7)
        hosted = [BlockStored(hashes=(h(n),), parent=h(n - 1), tier=Tier.HOST) for n in (2, 3)]
        dropped = [BlockRemoved(hashes=(h(n),), tier=Tier.HOST) for n in (2, 3)]
        events_of: list[KVEvent] = [stored(1), *hosted, removed(5), *dropped]
        for event in events_of:
            log.record(event)
        events = log.since(7, 0)
        assert events is not None
        assert events.events == (
            stored(1),
            BlockStored(hashes=(h(2), h(3)), parent=h(1), tier=Tier.HOST),
            removed(5),
            BlockRemoved(hashes=(h(2), h(3)), tier=Tier.HOST),
        )

    def test_an_event_that_was_read_no_longer_grows(self) -> None:
        log = EventLog(incarnation=7)
        log.record(stored(1))
        before = log.since(7, 0)
        log.record(stored(2, parent=1))
        assert before is not None
        assert before.events == (stored(1),)
        assert log.since(7, 1) == KVEvents(incarnation=7, first_seq=1, events=(stored(2, parent=1),))

    @pytest.mark.parametrize(("incarnation", "next_seq"), [(6, 0), (7, 0), (7, 4), (8, 2)])
    def test_dropped_events_cannot_be_replayed(self, incarnation: int, next_seq: int) -> None:
        """Another life, an event that fell off the ring, a number from the future."""
        log = log_of(stored(1), stored(5), stored(9), capacity=2)
        assert log.since(incarnation, next_seq) is None
        assert log.since(7, 1) is not None

    def test_a_snapshot_says_which_event_follows_it(self) -> None:
        log = log_of(stored(1), stored(5))
        assert log.snapshot([stored(1)]) == KVEvents(incarnation=7, first_seq=2, events=(stored(1),), snapshot=True)


class TestCursor:
    def test_the_first_events_of_a_life_replace_earlier_ones(self) -> None:
        cursor = EventCursor()
        assert cursor.accept(KVEvents(incarnation=7, first_seq=0, events=(stored(1),))) == (Cleared(), stored(1))
        assert cursor.accept(KVEvents(incarnation=7, first_seq=1, events=(stored(5),))) == (stored(5),)
        assert cursor.accept(KVEvents(incarnation=8, first_seq=0, events=(stored(3),))) == (Cleared(), stored(3))

    def test_events_seen_before_are_dropped(self) -> None:
        cursor = EventCursor()
        cursor.accept(KVEvents(incarnation=7, first_seq=0, events=(stored(1), stored(5))))
        again = KVEvents(incarnation=7, first_seq=0, events=(stored(1), stored(5), stored(9)))
        assert cursor.accept(again) == (stored(9),)
        assert cursor.accept(again) == ()

    def test_a_gap_names_the_next_event_and_changes_nothing(self) -> None:
        cursor = EventCursor()
        cursor.accept(KVEvents(incarnation=7, first_seq=0, events=(stored(1),)))
        late = KVEvents(incarnation=7, first_seq=3, events=(stored(9),))
        assert cursor.accept(late) == Gap(incarnation=7, next_seq=1)
        assert cursor.accept(late) == Gap(incarnation=7, next_seq=1)
        assert cursor.accept(KVEvents(incarnation=9, first_seq=1, events=())) == Gap(incarnation=9, next_seq=0)
        assert cursor.accept(KVEvents(incarnation=7, first_seq=1, events=(stored(5),))) == (stored(5),)

    def test_a_newer_snapshot_closes_a_gap(self) -> None:
        cursor = EventCursor()
        snapshot = KVEvents(incarnation=7, first_seq=5, events=(stored(1),), snapshot=True)
        assert cursor.accept(snapshot) == (Cleared(), stored(1))
        assert cursor.accept(KVEvents(incarnation=7, first_seq=5, events=(stored(9),))) == (stored(9),)
        assert cursor.accept(snapshot) == ()

    def test_an_earlier_life_is_not_listened_to(self) -> None:
        cursor = EventCursor()
        cursor.accept(KVEvents(incarnation=7, first_seq=0, events=()))
        assert cursor.accept(KVEvents(incarnation=6, first_seq=0, events=(stored(1),))) == ()
        assert cursor.accept(KVEvents(incarnation=6, first_seq=9, events=(stored(1),), snapshot=True)) == ()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40),
    st.lists(st.sampled_from(["read", "lose", "repeat"]), max_size=40),
)
def test_a_reader_that_follows_gaps_has_the_workers_blocks(changes: list[tuple[bool, int]], network: list[str]) -> None:
    log, cursor = EventLog(incarnation=7, capacity=3), EventCursor()
    truth: set[bytes] = set()
    known: set[bytes] = set()
    sent = 0

    def deliver(message: KVEvents) -> None:
        nonlocal known
        fresh = cursor.accept(message)
        if isinstance(fresh, Gap):
            snapshot = log.snapshot([stored(n) for n in range(21) if h(n) in truth])
            fresh = cursor.accept(log.since(fresh.incarnation, fresh.next_seq) or snapshot)
            assert not isinstance(fresh, Gap)
        known = apply(known, fresh)

    for index, (store, number) in enumerate(changes):
        event: KVEvent = stored(number) if store else removed(number)
        log.record(event)
        truth = apply(truth, (event,))
        fate = network[index] if index < len(network) else "read"
        message = log.since(7, sent)
        assert message is not None
        sent = log.next_seq
        for _ in range({"read": 1, "lose": 0, "repeat": 2}[fate]):
            deliver(message)
    end = log.since(7, sent)
    assert end is not None
    deliver(end)
    assert known == truth
