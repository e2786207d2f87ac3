"""A decode worker that is sent KV: what it answers, what it refuses, and that it never keeps a block too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_pool.config import DecodeConfig
from decode_pool.role import reservations
from kvtransfer.transport import MAX_TICKET_ID_BYTES
from kvtransfer.transports.inproc import Parcel
from protos.errors import (
    ContextLengthExceeded,
    IncompatibleWorkers,
    InvalidRequest,
    Misconfigured,
    Overloaded,
    TransferFailed,
    WorkerDraining,
)
from protos.values import FinishReason, ReserveRequest, Ticket
from tests.unit.decode_pool.pair import (
    BLOCK_BYTES,
    DECODE,
    LAYOUT,
    LEASE_S,
    NUM_ANSWER,
    PREFILL,
    SIZE,
    Pair,
    expected,
    prompt,
)

LENGTHS = (1, 3, 4, 5, 8, 17, 40)


def state(pair: Pair, request_id: str = "r", generation: int = 1) -> str | None:
    return pair.decode_role.ledger.state(request_id, generation)


# -- the way of a request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("early", [True, False], ids=["request before its KV", "KV before its request"])
def test_prefill_makes_the_first_token_and_decode_the_rest(length: int, early: bool) -> None:
    pair = Pair()
    asked = prompt(length)
    ticket = pair.start("r", asked)
    if not early:
        pair.step(3)
        assert state(pair) == "arrived"
    pair.answer("r", asked, ticket)
    pair.finish()
    assert pair.text("r") == expected(asked)
    assert pair.prefill.ended["r"] is FinishReason.PREFILLED
    assert pair.decode.ended["r"] is FinishReason.LENGTH
    assert pair.decode.runner.num_computed == NUM_ANSWER - 1, "decode computed a prompt token"


def test_the_first_token_does_not_wait_for_the_transfer() -> None:
    pair = Pair()
    pair.post.holding = True
    pair.start("r", prompt(9))
    pair.step()
    assert pair.prefill.tokens["r"] == expected(prompt(9), 1)
    assert state(pair) == "reserved"


def test_a_spoiled_block_changes_the_answer() -> None:
    """So the KV that decode reads is really the one that came."""
    pair = Pair()

    def spoil(parcel: Parcel) -> None:
        parcel.payload[-1, 0] += 1

    pair.post.spoil = spoil
    ticket = pair.start("r", prompt(9))
    pair.answer("r", prompt(9), ticket)
    pair.finish()
    assert pair.text("r")[0] == expected(prompt(9))[0]
    assert pair.text("r")[1:] != expected(prompt(9))[1:]


def test_requests_side_by_side_do_not_mix() -> None:
    pair = Pair(num_blocks=128)
    prompts = {f"r{index}": prompt(length, seed=index) for index, length in enumerate(LENGTHS)}
    for request_id, asked in prompts.items():
        pair.answer(request_id, asked, pair.start(request_id, asked))
    pair.finish()
    assert {request_id: pair.text(request_id) for request_id in prompts} == {
        request_id: expected(asked) for request_id, asked in prompts.items()
    }


def test_it_waits_for_the_last_block() -> None:
    pair = Pair(chunk_blocks=1)
    pair.post.holding = True
    ticket = pair.start("r", prompt(12))
    pair.answer("r", prompt(12), ticket)
    pair.step(3)
    for number, expected_state in enumerate(("sending", "sending", "adopted")):
        assert pair.decode.tokens["r"] == ()
        assert state(pair) == ("sending" if number else "reserved")
        pair.post.deliver(1)
        pair.step()
        assert state(pair) == expected_state
    pair.finish()
    assert pair.text("r") == expected(prompt(12))


def test_a_request_that_was_given_more_than_one_token_goes_on_after_them() -> None:
    """As after the loss of another pair: what was said so far is part of what is read."""
    pair = Pair()
    said = expected(prompt(6))[:3]
    ticket = pair.reserve("r", prompt(6) + said)
    pair.read("r", prompt(6) + said, ticket, max_tokens=1 + NUM_ANSWER)
    pair.step(3)
    first = pair.prefill.tokens["r"]
    pair.answer("r", prompt(6) + said, ticket, first)
    pair.finish()
    assert pair.text("r") == expected(prompt(6) + said)


def test_a_request_without_a_ticket_is_served_whole() -> None:
    pair = Pair()
    pair.answer("r", prompt(7), None)
    pair.finish()
    assert expected(prompt(7), 1) + pair.text("r") == expected(prompt(7))
    assert pair.post.num_carried == 0


# -- its own cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "num_missing"), [(20, 3), (22, 4), (8, 0), (9, 1), (4, 0)])
def test_only_what_is_not_cached_travels(length: int, num_missing: int) -> None:
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


def test_what_arrived_serves_the_next_turn_with_the_answer() -> None:
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


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 2), ("num_kv_heads", 4), ("head_dim", 3), ("block_size", 8), ("dtype", "bfloat16"), ("tp", 2)],
)
def test_another_layout_is_refused_by_field(field: str, value: object) -> None:
    pair = Pair()
    with pytest.raises(IncompatibleWorkers, match=rf"p0 to worker d0: {field} is {value!r} there and") as error:
        pair.reserve("r", prompt(4), source_layout=replace(LAYOUT, **{field: value}))
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
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    pair = Pair()
    asked = ReserveRequest(request_id="r", prompt_ids=prompt(4), source=PREFILL, source_layout=LAYOUT)
    with pytest.raises(InvalidRequest) as error:
        pair.decode_role.reserve(replace(asked, **changes), 0.0)  # type: ignore[arg-type]
    assert error.value.param == param
    pair.assert_idle()


def test_too_long_a_prompt_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match="at most 24"):
        Pair(decode_blocks=6).reserve("r", prompt(25))


def test_a_reservation_is_all_or_nothing() -> None:
    pair = Pair(decode_blocks=10)
    pair.reserve("first", prompt(20))
    with pytest.raises(Overloaded, match=r"d0 has 5 free.*6 are needed") as error:
        pair.reserve("r", prompt(24))
    assert error.value.retry_after_s == DecodeConfig().retry_after_s
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
    reserve = reservations(pair.decode_role, pair.decode.engine)
    asked = ReserveRequest(request_id="r", prompt_ids=prompt(4), source=PREFILL, source_layout=LAYOUT)
    assert reserve(asked, 0.0).ticket_id == "r"
    pair.decode.engine.drain()
    with pytest.raises(WorkerDraining):
        reserve(replace(asked, request_id="s"), 0.0)


def test_reservations_do_not_starve_requests_that_wait_here() -> None:
    pair = Pair(decode_blocks=8)
    pair.reserve("held", prompt(16))
    pair.answer("waits", prompt(20), None)
    pair.step()
    asked = ReserveRequest(request_id="r", prompt_ids=prompt(4), source=PREFILL, source_layout=LAYOUT)
    with pytest.raises(Overloaded, match="waiting for KV blocks"):
        reservations(pair.decode_role, pair.decode.engine)(asked, pair.now)


def test_a_request_with_other_tokens_than_were_reserved_is_refused() -> None:
    pair = Pair()
    ticket = pair.start("r", prompt(9))
    pair.answer("r", prompt(9, seed=4), ticket)
    pair.finish()
    assert pair.decode.errors["r"].code == InvalidRequest.code
    assert pair.decode.tokens["r"] == ()


def test_settings_are_checked() -> None:
    with pytest.raises(Misconfigured, match="headroom is 1"):
        DecodeConfig(headroom=1.0)
    with pytest.raises(Misconfigured, match="max_lease_s"):
        DecodeConfig(max_lease_s=0)


# -- what may go wrong, at every state ---------------------------------------------------------------------------------


def at(pair: Pair, reached: str) -> Ticket:
    """Brings the ticket "r" of a prompt of three blocks to a state."""
    pair.post.holding = True
    ticket = pair.start("r", prompt(12))
    pair.step(4)
    pair.post.deliver({"reserved": 0, "sending": 1, "arrived": None}[reached])
    pair.step()
    assert state(pair) == reached
    return ticket


STATES = pytest.mark.parametrize("reached", ["reserved", "sending", "arrived"])
SUBMITTED = pytest.mark.parametrize("submitted", [True, False], ids=["request here", "request not here yet"])


@STATES
@SUBMITTED
def test_an_abort_frees_everything_at_once(reached: str, submitted: bool) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = at(pair, reached)
    if submitted:
        pair.answer("r", prompt(12), ticket)
    assert pair.decode.engine.abort(["r"]) == 1
    pair.decode.pool.assert_idle()
    assert state(pair) == "aborted"
    assert pair.decode.engine.abort(["r"]) == 0
    pair.finish()
    assert pair.decode.tokens["r"] == ()
    assert pair.decode.engine.load().num_tickets == 0


@pytest.mark.parametrize("reached", ["reserved", "sending"])
def test_a_request_that_waits_is_told_when_the_lease_ends(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    pair.answer("r", prompt(12), at(pair, reached))
    pair.step(2, seconds=LEASE_S)
    assert state(pair) == "expired"
    pair.decode.pool.assert_idle()
    pair.step()
    assert pair.decode.errors["r"].code == TransferFailed.code
    pair.finish()


@STATES
def test_a_request_that_comes_after_the_lease_is_told_why(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = at(pair, reached)
    pair.step(seconds=LEASE_S)
    assert state(pair) == "expired"
    pair.decode.pool.assert_idle()
    pair.answer("r", prompt(12), ticket)
    pair.step(2)
    assert pair.decode.errors["r"].code == TransferFailed.code
    num_here = {"reserved": 0, "sending": 1, "arrived": 3}[reached]
    assert f"{num_here} of 3 blocks were here" in pair.decode.errors["r"].message
    pair.finish()


def test_an_abort_takes_a_failure_back_that_was_not_told_yet() -> None:
    pair = Pair()
    ticket = pair.reserve("r", prompt(9))
    pair.step(seconds=LEASE_S)
    pair.answer("r", prompt(9), ticket)
    pair.step()
    pair.decode.engine.abort(["r"])
    pair.answer("r", prompt(9), None)
    pair.finish()
    assert "r" not in pair.decode.errors
    assert pair.decode.tokens["r"] == expected(prompt(9))[1:]


def test_an_adopted_ticket_knows_no_lease() -> None:
    """The request waits for its turn, with its KV: that may take longer than any lease."""
    pair = Pair()
    ticket = pair.start("r", prompt(9))
    pair.answer("r", prompt(9), ticket)
    pair.step(3)
    assert state(pair) == "adopted"
    pair.step(seconds=10 * LEASE_S)
    pair.finish()
    assert pair.text("r") == expected(prompt(9))


@STATES
@SUBMITTED
def test_a_lost_lane_ends_what_it_has_not_brought(reached: str, submitted: bool) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = at(pair, reached)
    if submitted:
        pair.answer("r", prompt(12), ticket)
    pair.exchange.sever(PREFILL, DECODE, "the cable was cut")
    pair.step(2)
    if reached == "arrived":
        if not submitted:
            pair.answer("r", prompt(12), ticket)
        pair.finish()
        assert pair.text("r") == expected(prompt(12))
        return
    assert state(pair) == "aborted"
    pair.decode.pool.assert_idle()
    if submitted:
        assert pair.decode.errors["r"].code == TransferFailed.code
        assert "the cable was cut" in pair.decode.errors["r"].message
    pair.finish()


def test_a_lost_lane_is_replaced_by_the_next_reservation() -> None:
    pair = Pair()
    at(pair, "reserved")
    pair.exchange.sever(PREFILL, DECODE, "the cable was cut")
    ticket = pair.start("again", prompt(9))
    pair.answer("again", prompt(9), ticket)
    pair.finish()
    assert pair.text("again") == expected(prompt(9)), "the loss of the old lane hit the new ticket"
    assert state(pair) == "aborted"


def test_a_late_chunk_never_lands_in_blocks_that_moved_on() -> None:
    pair = Pair(num_blocks=16, decode_blocks=3)
    at(pair, "reserved")
    pair.decode.engine.abort(["r"])
    ticket = pair.reserve("next", prompt(12, seed=9))
    pair.post.holding = False
    pair.read("next", prompt(12, seed=9), ticket)
    pair.step(4)
    assert state(pair, "next") == "arrived"
    content = pair.decode.runner.gather(ticket.block_ids).tolist()
    pair.post.deliver()
    pair.step()
    assert pair.decode.runner.gather(ticket.block_ids).tolist() == content
    assert not pair.decode_role._mover.busy(), "the late payload is still kept"


# -- generations -------------------------------------------------------------------------------------------------------


@STATES
def test_the_same_reservation_twice_is_one(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    at(pair, reached)
    free = pair.decode.pool.num_free
    again = pair.reserve("r", prompt(12))
    assert pair.decode.pool.num_free == free
    assert 0 < again.lease_s <= LEASE_S
    pair.answer("r", prompt(12), again)
    pair.finish()
    assert pair.text("r") == expected(prompt(12))


@STATES
def test_a_newer_generation_takes_the_place_of_the_older(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    at(pair, reached)
    pair.prefill.engine.abort(["r"])
    ticket = pair.reserve("r", prompt(12), generation=2)
    assert len(pair.decode_role.ledger) == 1
    pair.post.deliver()
    pair.step(2)
    assert state(pair, generation=2) == "reserved", "chunks of the first generation were believed"
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
    assert state(pair, generation=2) == "reserved"


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
    assert pair.reserve("r", prompt(9), lease_s=1e9).lease_s == DecodeConfig().max_lease_s


def test_stats_name_every_ticket() -> None:
    pair = Pair(chunk_blocks=1)
    at(pair, "sending")
    (ticket,) = pair.decode_role.tickets(pair.now)
    assert (ticket.ticket_id, ticket.state, ticket.owner) == ("r", "sending", "p0#1")
    assert ticket.num_bytes == 3 * LAYOUT.block_bytes
    assert pair.decode.engine.load().num_tickets == 1


# -- anything in any order ---------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["start", "hand over", "deliver", "abort prefill", "abort decode", "sever", "step", "wait"]),
        st.integers(0, 4),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(actions=ACTIONS)
def test_whatever_happens_nothing_is_kept_and_no_answer_is_wrong(actions: list[tuple[str, int]]) -> None:
    pair = Pair(num_blocks=24, chunk_blocks=1, staged_blocks=2)
    pair.post.holding = True
    prompts = [prompt(3 + 5 * number, seed=number % 2) for number in range(5)]
    tickets = {}
    handed_over = set()
    attempts = 0
    for action, number in actions:
        names = [name for name in tickets if name.endswith(f"-{number}")]
        name = names[-1] if names else ""
        if action == "start":
            attempts += 1
            name = f"{attempts}-{number}"
            try:
                tickets[name] = pair.start(name, prompts[number])
            except Overloaded:
                continue
        elif action == "hand over" and name and name not in handed_over:
            handed_over.add(name)
            pair.answer(name, prompts[number], tickets[name])
        elif action == "deliver":
            pair.post.deliver(number)
        elif action == "abort prefill":
            pair.prefill.engine.abort([name])
        elif action == "abort decode":
            pair.decode.engine.abort([name])
        elif action == "sever":
            pair.exchange.sever(PREFILL, DECODE, "cut")
        elif action == "wait":
            pair.step(seconds=LEASE_S / 3)
        else:
            pair.step()
    pair.finish()
    for name in handed_over:
        right = expected(prompts[int(name.rpartition("-")[2])])[1:]
        got = pair.decode.tokens[name]
        assert got == right[: len(got)]
        assert pair.decode.ended.get(name) is not FinishReason.LENGTH or got == right
