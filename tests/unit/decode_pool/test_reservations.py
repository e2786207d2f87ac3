"""Reservations: what is promised, what is refused, what is cached already, and which generation counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.transport import MAX_TICKET_ID_BYTES
from protos.errors import (
    ContextLengthExceeded,
    IncompatibleWorkers,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    WorkerDraining,
)
from protos.values import ReserveRequest
from tests.layouts import changed
from tests.unit.decode_pool.pair import (
    BLOCK_BYTES,
    LAYOUT,
    LEASE_S,
    NUM_ANSWER,
    PREFILL,
    SIZE,
    Pair,
    expected,
    prompt,
)
from workers.transfer.receive import reservations
from workers.worker_config import TransferConfig

STATES = pytest.mark.parametrize("reached", ["reserved", "sending", "arrived"])


# -- its own cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "num_missing"), [(20, 3), (22, 4), (8, 0), (9, 1), (4, 0)])
def test_only_uncached_blocks_are_sent(length: int, num_missing: int) -> None:
    """The first request leaves its prompt's two full blocks, and its answer's, in the cache."""
    pair = Pair()
    before = pair.start("before", prompt(8))
    pair.answer("before", prompt(8), before)
    pair.finish()
    moved = pair.decode.engine.load().transfer_bytes
    ticket = pair.start("r", prompt(length))
    assert len(ticket.block_ids) == num_missing
    assert ticket.num_cached_tokens == min(8, length // SIZE * SIZE)
    pair.answer("r", prompt(length), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(length))
    assert pair.decode.engine.load().transfer_bytes - moved == num_missing * BLOCK_BYTES
    assert pair.decode.cached["r"] == ticket.num_cached_tokens


def test_arrived_blocks_and_the_answer_serve_the_next_turn() -> None:
    pair = Pair()
    ticket = pair.start("r", prompt(8))
    pair.answer("r", prompt(8), ticket)
    pair.finish()
    turn = prompt(8) + pair.text("r") + prompt(5, seed=2)
    assert pair.reserve("next", turn).num_cached_tokens == (8 + NUM_ANSWER - 1) // SIZE * SIZE


def test_tenants_share_no_cache() -> None:
    pair = Pair()
    ticket = pair.start("r", prompt(8))
    pair.answer("r", prompt(8), ticket)
    pair.finish()
    assert pair.reserve("other", prompt(8), cache_salt=b"another tenant").num_cached_tokens == 0


def test_a_cached_block_under_a_ticket_is_not_evicted() -> None:
    pair = Pair(decode_blocks=6)
    ticket = pair.start("r", prompt(8))
    pair.answer("r", prompt(8), ticket)
    pair.finish()
    held = pair.start("held", prompt(8))
    assert held.num_cached_tokens == 8
    for index in range(3):
        pair.answer(f"other{index}", prompt(9, seed=5 + index), None)
        pair.step(8)
    pair.answer("held", prompt(8), held)
    pair.finish()
    assert pair.text("held") == expected(prompt(8))


def test_an_abort_before_its_reservation_leaves_nothing() -> None:
    pair = Pair()
    assert pair.decode.engine.abort(["r"]) == 0
    with pytest.raises(TransferFailed, match="its gateway gave it up before it was reserved"):
        pair.reserve("r", prompt(8))
    pair.assert_idle()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 2),
        ("num_kv_heads", 4),
        ("head_dim", 3),
        ("block_size", 6),
        ("dtype", "bfloat16"),
        ("model", "b"),
        ("device", "cuda"),
    ],
)
def test_another_layout_is_refused_by_field(field: str, value: Any) -> None:
    pair = Pair()
    with pytest.raises(IncompatibleWorkers, match=rf"p0 to worker d0: {field} is {value!r} there and") as error:
        pair.reserve("r", prompt(4), source_layout=changed(LAYOUT, **{field: value}))
    assert error.value.param == "source_layout"
    pair.assert_idle()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_ids": ()}, "prompt"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * (MAX_TICKET_ID_BYTES + 1)}, "request_id"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"generation": 0}, "generation"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    pair = Pair()
    asked = ReserveRequest(request_id="r", prompt_ids=prompt(4), source=PREFILL, source_layout=LAYOUT)
    with pytest.raises(InvalidRequest) as error:
        pair.decode_role.reserve(replace(asked, **changes), 0.0)  # type: ignore[arg-type]
    assert error.value.param == param
    pair.assert_idle()


def test_too_long_a_prompt_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match="24"):
        Pair(decode_blocks=6).reserve("r", prompt(25))


def test_a_reservation_is_all_or_nothing() -> None:
    pair = Pair(decode_blocks=10)
    pair.reserve("first", prompt(20))
    with pytest.raises(Overloaded, match=r"d0 has 5 free.* 6") as error:
        pair.reserve("r", prompt(24))
    assert error.value.retry_after_s == TransferConfig().retry_after_s
    pair.check()
    assert len(pair.reserve("r", prompt(20)).block_ids) == 5


def test_a_refused_reservation_lets_go_of_the_cached_blocks_too() -> None:
    pair = Pair(decode_blocks=10)
    before = pair.start("before", prompt(8))
    pair.answer("before", prompt(8), before)
    pair.finish()
    pair.reserve("first", prompt(20, seed=2))
    with pytest.raises(Overloaded):
        pair.reserve("r", prompt(32))
    pair.check()


def test_running_answers_keep_some_blocks_to_grow_into() -> None:
    pair = Pair(decode_blocks=10, headroom=0.2)
    assert len(pair.reserve("idle", prompt(36)).block_ids) == 9, "an idle worker has nobody to keep blocks for"
    pair.decode_role.withdraw("idle")
    pair.reserve("first", prompt(4))
    with pytest.raises(Overloaded, match="keeps 2"):
        pair.reserve("r", prompt(32))
    pair.reserve("r", prompt(28))


def test_a_draining_worker_takes_no_reservations() -> None:
    pair = Pair()
    reserve = reservations(pair.decode_role.incoming, pair.decode.engine)
    asked = ReserveRequest(request_id="r", prompt_ids=prompt(4), source=PREFILL, source_layout=LAYOUT)
    assert reserve(asked, 0.0).ticket_id == "r"
    pair.decode.engine.drain()
    with pytest.raises(WorkerDraining):
        reserve(replace(asked, request_id="s"), 0.0)
    assert reserve(asked, 1.0).ticket_id == "r", "what was promised before is kept, and may be renewed"
    with pytest.raises(WorkerDraining):
        reserve(replace(asked, generation=2), 1.0)


def test_reservations_do_not_starve_requests_that_wait_here() -> None:
    pair = Pair(decode_blocks=8)
    pair.reserve("held", prompt(16))
    pair.answer("waits", prompt(20), None)
    pair.step()
    asked = ReserveRequest(request_id="r", prompt_ids=prompt(4), source=PREFILL, source_layout=LAYOUT)
    reserve = reservations(pair.decode_role.incoming, pair.decode.engine)
    with pytest.raises(Overloaded, match="waiting for KV blocks"):
        reserve(asked, pair.now)
    held = replace(asked, request_id="held", prompt_ids=prompt(16))
    assert reserve(held, pair.now).ticket_id == "held", "what was promised before is kept, and may be renewed"


def test_a_request_with_other_tokens_than_reserved_is_refused() -> None:
    pair = Pair()
    ticket = pair.start("r", prompt(9))
    pair.answer("r", prompt(9, seed=4), ticket)
    pair.finish()
    assert pair.decode.errors["r"].code == InvalidRequest.code
    assert pair.decode.tokens["r"] == ()


# -- generations -------------------------------------------------------------------------------------------------------


@STATES
def test_the_same_reservation_twice_is_one(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    pair.bring_to(reached)
    free = pair.decode.pool.num_free
    again = pair.reserve("r", prompt(12))
    assert pair.decode.pool.num_free == free
    assert again.lease_s == LEASE_S
    pair.answer("r", prompt(12), again)
    pair.finish()
    assert pair.text("r") == expected(prompt(12))


@STATES
def test_a_ticket_lives_while_it_is_renewed(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = pair.bring_to(reached)
    for _ in range(4):
        pair.decode.step(pair.now + 0.8 * LEASE_S)
        pair.now += 0.8 * LEASE_S
        assert pair.reserve("r", prompt(12)) == ticket
    assert pair.state() == reached
    pair.decode.step(pair.now + LEASE_S)
    assert pair.state() == "expired"
    with pytest.raises(TransferFailed, match="no gateway renewed it for 50 s"):
        pair.reserve("r", prompt(12))
    pair.prefill.engine.abort(["r"])
    pair.finish()


@STATES
def test_a_newer_generation_takes_the_place_of_the_older(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    pair.bring_to(reached)
    pair.prefill.engine.abort(["r"])
    ticket = pair.reserve("r", prompt(12), generation=2)
    assert len(pair.decode_role.ledger) == 1
    pair.post.deliver()
    pair.step(2)
    assert pair.state(generation=2) == "reserved", "chunks of the first generation were believed"
    pair.post.holding = False
    pair.read("r2", prompt(12), ticket)
    pair.answer("r", prompt(12), ticket)
    pair.finish()
    assert pair.prefill.tokens["r2"] + pair.decode.tokens["r"] == expected(prompt(12))


def test_a_request_with_a_fenced_ticket_is_told() -> None:
    pair = Pair()
    old = pair.reserve("r", prompt(9))
    pair.answer("r", prompt(9), old)
    pair.step()
    pair.reserve("r", prompt(9), generation=2)
    pair.step(2)
    assert pair.decode.errors["r"].code == TransferFailed.code
    assert "fenced" in pair.decode.errors["r"].message
    assert pair.state(generation=2) == "reserved"


def test_a_fenced_or_ended_generation_cannot_be_reserved_again() -> None:
    pair = Pair()
    pair.reserve("r", prompt(9), generation=2)
    with pytest.raises(TransferFailed, match="too late"):
        pair.reserve("r", prompt(9), generation=1)
    pair.decode.engine.abort(["r"])
    with pytest.raises(TransferFailed, match="aborted"):
        pair.reserve("r", prompt(9), generation=2)
    pair.assert_idle()


def test_no_lease_is_longer_than_this_worker_allows() -> None:
    pair = Pair()
    assert pair.reserve("r", prompt(9), lease_s=1e9).lease_s == TransferConfig().max_lease_s


def test_stats_name_every_ticket() -> None:
    pair = Pair(chunk_blocks=1)
    pair.bring_to("sending")
    (ticket,) = pair.decode_role.tickets(pair.now)
    assert (ticket.ticket_id, ticket.state, ticket.owner) == ("r", "sending", "p0#1")
    assert ticket.num_bytes == 3 * LAYOUT.block_bytes
    assert pair.decode.engine.load().num_tickets == 1
