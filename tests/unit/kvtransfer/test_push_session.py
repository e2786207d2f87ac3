"""A push in the making: what may be offered when, and in which pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.push_session import Session
from kvtransfer.transport import Chunk
from protos.values import KVLayout, LaneAddress, Ticket
from tests.layouts import changed

SIZE = 4
LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=SIZE, dtype="float32")


def session(num_tokens: int, *, num_cached: int = 0, max_chunk_blocks: int = 100) -> Session:
    num_blocks = -(-num_tokens // SIZE) - num_cached // SIZE
    ticket = Ticket(
        ticket_id="r1",
        generation=2,
        lease_s=10.0,
        block_ids=tuple(range(50, 50 + num_blocks)),
        num_cached_tokens=num_cached,
        layout=LAYOUT,
        destination=LaneAddress(worker_id="d0", incarnation=1, host="127.0.0.1", port=1),
    )
    return Session(ticket, max_chunk_blocks=max_chunk_blocks)


def piece(first_block: int, num_blocks: int) -> Chunk:
    return Chunk(ticket_id="r1", generation=2, first_block=first_block, num_blocks=num_blocks)


def test_full_blocks_go_while_the_prompt_is_still_being_read() -> None:
    push = session(11)
    assert push.next_chunk(3, complete=False) is None
    assert push.next_chunk(9, complete=False) == piece(0, 2)


def test_the_last_block_goes_when_the_prompt_is_complete() -> None:
    push = session(11)
    push.offered(piece(0, 2), 0.0)
    assert push.next_chunk(11, complete=False) is None
    assert push.next_chunk(11, complete=True) == piece(2, 1)
    push.offered(piece(2, 1), 0.0)
    assert push.all_offered
    assert push.next_chunk(11, complete=True) is None


@given(
    num_layers=st.integers(1, 9), num_left=st.integers(1, 5), least=st.integers(1, 4000), max_blocks=st.integers(4, 5)
)
def test_the_rest_is_sent_in_groups_of_layers(num_layers: int, num_left: int, least: int, max_blocks: int) -> None:
    push = session(4 * SIZE + num_left * SIZE - 1, max_chunk_blocks=max_blocks)
    ticket = replace(push.ticket, layout=changed(LAYOUT, num_layers=num_layers))
    push = Session(ticket, max_chunk_blocks=max_blocks)
    push.offered(piece(0, 4), 0.0)
    chunks = push.last_chunks(0.0, least_bytes=least)
    assert push.all_offered
    assert push.last_chunks(0.0, least_bytes=least) == ()
    assert all(chunk.num_blocks <= max_blocks for chunk in chunks)
    cells = [
        (block, layer)
        for chunk in chunks
        for block in range(chunk.first_block, chunk.first_block + chunk.num_blocks)
        for layer in chunk.layers(push.ticket.layout)
    ]
    assert sorted(cells) == [(block, layer) for block in range(4, 4 + num_left) for layer in range(num_layers)]
    assert [chunk.first_layer for chunk in chunks] == sorted(chunk.first_layer for chunk in chunks)
    groups = sorted(
        {(chunk.layers(push.ticket.layout).start, chunk.layers(push.ticket.layout).stop) for chunk in chunks}
    )
    assert all((stop - start) * num_left * LAYOUT.block_bytes >= least for start, stop in groups[:-1])
    push.sent(piece(0, 4), 1.0)
    for item in chunks:
        assert push.num_sent < 4 + num_left
        assert push.expired(12.0)
        push.sent(item, 1.0)
    assert push.num_sent == 4 + num_left
    assert not push.expired(1000.0)


def test_cached_blocks_of_the_destination_are_not_sent() -> None:
    push = session(12, num_cached=8)
    assert push.first_block == 2
    assert push.next_chunk(8, complete=False) is None
    assert push.next_chunk(12, complete=True) == piece(0, 1)


def test_nothing_travels_when_all_is_cached() -> None:
    push = session(8, num_cached=8)
    assert push.all_offered
    assert push.next_chunk(8, complete=True) is None


def test_a_recomputation_sends_nothing_twice() -> None:
    """After a preemption the count of computed tokens starts over."""
    push = session(12)
    push.offered(piece(0, 2), 0.0)
    assert push.next_chunk(4, complete=False) is None
    assert push.next_chunk(12, complete=False) == piece(2, 1)


@pytest.mark.parametrize(("num_tokens", "fits"), [(8, False), (9, True), (12, True), (13, False)])
def test_a_ticket_is_for_one_number_of_blocks(num_tokens: int, fits: bool) -> None:
    assert session(11, num_cached=4).fits(num_tokens) is fits


def test_blocks_waiting_to_be_read_do_not_expire() -> None:
    push = session(8)
    assert not push.expired(1e9)
    push.offered(piece(0, 1), 1e9)
    assert not push.expired(1e9 + 9.9)
    assert push.expired(1e9 + 10.0)


def test_the_lease_is_renewed_by_sent_blocks() -> None:
    push = session(12)
    push.offered(piece(0, 1), 5.0)
    push.offered(piece(1, 1), 6.0)
    assert not push.expired(14.9)
    assert push.expired(15.0), "an offer is no progress"
    push.sent(piece(0, 1), 12.0)
    assert not push.expired(21.9)
    assert push.expired(22.0)


def test_a_push_without_open_offers_waits_for_the_prompt() -> None:
    push = session(8)
    push.offered(piece(0, 1), 5.0)
    push.sent(piece(0, 1), 6.0)
    assert not push.expired(1e9)
    push.offered(piece(1, 1), 1e9)
    assert push.expired(1e9 + 10.0)


@given(
    num_tokens=st.integers(1, 60),
    cached_blocks=st.integers(0, 15),
    limit=st.integers(1, 5),
    steps=st.lists(st.integers(0, 12), max_size=8),
)
def test_every_block_is_offered_once_in_order_and_never_early(
    num_tokens: int, cached_blocks: int, limit: int, steps: list[int]
) -> None:
    push = session(num_tokens, num_cached=min(cached_blocks, num_tokens // SIZE) * SIZE, max_chunk_blocks=limit)
    computed = 0
    offered: list[int] = []
    for step in (*steps, num_tokens):
        computed = min(num_tokens, computed + step)
        complete = computed == num_tokens
        while (chunk := push.next_chunk(computed, complete=complete)) is not None:
            assert chunk.num_blocks <= limit
            last = push.first_block + chunk.first_block + chunk.num_blocks
            assert complete or last * SIZE <= computed
            offered += range(chunk.first_block, chunk.first_block + chunk.num_blocks)
            push.offered(chunk, 0.0)
    assert push.all_offered
    assert offered == list(range(len(push.ticket.block_ids)))


def test_a_short_sequence_offers_only_its_blocks() -> None:
    push = session(40)
    push.offered(piece(0, 2), 0.0)
    assert not push.all_sent(11)
    push.sent(piece(0, 2), 1.0)
    assert push.all_sent(11)
    assert not push.is_full(39)
    assert push.is_full(40)
    push.truncate(11)
    assert push.next_chunk(11, complete=True) == piece(2, 1)
    push.offered(piece(2, 1), 2.0)
    assert push.all_offered
