"""Who goes next: priorities, tenants by tokens served, deadlines."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_queue import Entry, FairQueue


def entry(
    number: int, tenant: str = "a", *, priority: int = 0, num_tokens: int = 100, deadline_s: float = math.inf
) -> Entry:
    return Entry(number=number, tenant=tenant, priority=priority, num_tokens=num_tokens, deadline_s=deadline_s)


def drained(queue: FairQueue) -> list[Entry]:
    """Serves everybody in turn."""
    order = []
    while (head := queue.peek()) is not None:
        queue.remove(head)
        queue.charge(head.tenant, num_input=head.num_tokens)
        order.append(head)
    return order


def test_the_earliest_deadline_goes_first_then_who_came_first() -> None:
    queue = FairQueue()
    for queued in (entry(0), entry(1, deadline_s=9.0), entry(2), entry(3, deadline_s=5.0)):
        queue.push(queued)
    assert [message.number for message in drained(queue)] == [3, 1, 0, 2]


def test_a_higher_priority_goes_before_every_deadline() -> None:
    queue = FairQueue()
    for queued in (entry(0, deadline_s=1.0), entry(1, "b", priority=1), entry(2, priority=-1, deadline_s=0.0)):
        queue.push(queued)
    assert [message.number for message in drained(queue)] == [1, 0, 2]


@pytest.mark.parametrize(
    ("weights", "waiting", "first"),
    [
        pytest.param({}, [("flood", 50, 100), ("quiet", 3, 100)], {"flood": 3, "quiet": 3}, id="a flood waits"),
        pytest.param({}, [("long", 20, 1000), ("short", 20, 100)], {"long": 1, "short": 10}, id="tokens count"),
        pytest.param({"big": 3.0}, [("big", 20, 100), ("small", 20, 100)], {"big": 6, "small": 2}, id="by weight"),
    ],
)
def test_tenants_that_wait_share_what_is_served(
    weights: dict[str, float], waiting: list[tuple[str, int, int]], first: dict[str, int]
) -> None:
    queue, numbers = FairQueue(weights), count()
    for tenant, num_requests, num_tokens in waiting:
        for _ in range(num_requests):
            queue.push(entry(next(numbers), tenant, num_tokens=num_tokens))
    assert Counter(message.tenant for message in drained(queue)[: sum(first.values())]) == first


def test_answers_count_as_well() -> None:
    queue = FairQueue()
    queue.push(entry(0, "writes"))
    queue.push(entry(1, "reads"))
    queue.charge("writes", num_output=60)  # twice 60 is more than 100
    queue.charge("reads", num_input=100)
    assert [message.tenant for message in drained(queue)] == ["reads", "writes"]


def test_silence_saves_nothing_up() -> None:
    queue = FairQueue()
    for number in range(10):
        queue.push(entry(number, "steady"))
    drained(queue)
    for number in range(10, 20):
        queue.push(entry(number, "steady"))
        queue.push(entry(100 + number, "returned"))
    assert Counter(message.tenant for message in drained(queue)[:4]) == {"steady": 2, "returned": 2}


def test_the_last_job_is_of_the_tenant_with_the_longest_queue() -> None:
    queue = FairQueue()
    for number in range(5):
        queue.push(entry(number, "flood"))
    queue.push(entry(9, "quiet"))
    last = queue.last()
    assert last is not None
    assert (last.tenant, last.number) == ("flood", 4)


def test_tokens_ahead_follow_the_fair_order() -> None:
    queue = FairQueue()
    for number in range(30):
        queue.push(entry(number, "flood"))
    assert queue.tokens_ahead(entry(99, "flood")) == 3000
    assert queue.tokens_ahead(entry(99, "quiet")) == 100  # its share of what the flood has
    queue.push(entry(50, "other", priority=1, num_tokens=700))
    assert queue.tokens_ahead(entry(99, "quiet")) == 800


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 500), st.sampled_from([1.0, 5.0, math.inf])
        ),
        max_size=40,
    ),
    st.data(),
)
def test_everybody_leaves_once(given_entries: list[tuple[str, int, int, float]], data: st.DataObject) -> None:
    queue, inside = FairQueue({"a": 2.0}), dict[int, Entry]()
    for number, (tenant, priority, num_tokens, deadline_s) in enumerate(given_entries):
        queued = entry(number, tenant, priority=priority, num_tokens=num_tokens, deadline_s=deadline_s)
        queue.push(queued)
        inside[number] = queued
        if data.draw(st.booleans()):
            leaving = inside.pop(data.draw(st.sampled_from(sorted(inside))))
            queue.remove(leaving)
            queue.remove(leaving)  # twice is no error
        assert len(queue) == len(inside) == len(list(queue))
        assert queue.next_deadline_s() == min((left.deadline_s for left in inside.values()), default=math.inf)
        assert {late.number for late in queue.late(5.0)} == {n for n, left in inside.items() if left.deadline_s <= 5.0}
    assert sorted(message.number for message in drained(queue)) == sorted(inside)
    assert not queue
    assert queue.last() is None
