"""A decode worker that is sent KV: what it answers, what it refuses, and that it never keeps a block too long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.transports.inproc import InprocParcel
from protos.errors import (
    Overloaded,
    TransferCorrupted,
    TransferFailed,
)
from protos.values import FinishReason, Ticket
from tests.unit.decode_pool.pair import (
    DECODE,
    LEASE_S,
    NUM_ANSWER,
    PREFILL,
    Pair,
    expected,
    prompt,
)

LENGTHS = (1, 3, 4, 5, 8, 17, 40)


# -- the way of a request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("early", [True, False], ids=["request before its KV", "KV before its request"])
def test_prefill_makes_the_first_token_and_decode_the_rest(length: int, early: bool) -> None:
    pair = Pair()
    asked = prompt(length)
    ticket = pair.start("r", asked)
    if not early:
        pair.step(3)
        assert pair.state() == "arrived"
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
    assert pair.state() == "reserved"


def test_a_spoiled_block_changes_the_answer() -> None:
    """So the KV that decode reads is really the one that came."""
    pair = Pair()

    def spoil(parcel: InprocParcel) -> None:
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
        assert pair.state() == ("sending" if number else "reserved")
        pair.post.deliver(1)
        pair.step()
        assert pair.state() == expected_state
    pair.finish()
    assert pair.text("r") == expected(prompt(12))


def test_a_request_continues_after_several_given_tokens() -> None:
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


# -- what may go wrong, at every state ---------------------------------------------------------------------------------


STATES = pytest.mark.parametrize("reached", ["reserved", "sending", "arrived"])
SUBMITTED = pytest.mark.parametrize("submitted", [True, False], ids=["request here", "request not here yet"])


@STATES
@SUBMITTED
def test_an_abort_frees_everything_at_once(reached: str, submitted: bool) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = pair.bring_to(reached)
    if submitted:
        pair.answer("r", prompt(12), ticket)
    assert pair.decode.engine.abort(["r"]) == 1
    pair.decode.pool.assert_idle()
    assert pair.state() == "aborted"
    assert pair.decode.engine.abort(["r"]) == 0
    pair.finish()
    assert pair.decode.tokens["r"] == ()
    assert pair.decode.engine.load().num_tickets == 0


@pytest.mark.parametrize("reached", ["reserved", "sending"])
def test_a_request_that_waits_is_told_when_the_lease_ends(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    pair.answer("r", prompt(12), pair.bring_to(reached))
    pair.step(2, seconds=LEASE_S)
    assert pair.state() == "expired"
    pair.decode.pool.assert_idle()
    pair.step()
    assert pair.decode.errors["r"].code == TransferFailed.code
    pair.finish()


@STATES
def test_a_request_that_comes_after_the_lease_is_told_why(reached: str) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = pair.bring_to(reached)
    pair.step(seconds=LEASE_S)
    assert pair.state() == "expired"
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
    pair = Pair()
    ticket = pair.start("r", prompt(9))
    pair.answer("r", prompt(9), ticket)
    pair.step(3)
    assert pair.state() == "adopted"
    pair.step(seconds=10 * LEASE_S)
    pair.finish()
    assert pair.text("r") == expected(prompt(9))


@STATES
@SUBMITTED
def test_a_lost_lane_ends_unarrived_tickets(reached: str, submitted: bool) -> None:
    pair = Pair(chunk_blocks=1)
    ticket = pair.bring_to(reached)
    if submitted:
        pair.answer("r", prompt(12), ticket)
    pair.exchange.cut(PREFILL, DECODE, "the cable was cut")
    pair.step(2)
    if reached == "arrived":
        if not submitted:
            pair.answer("r", prompt(12), ticket)
        pair.finish()
        assert pair.text("r") == expected(prompt(12))
        return
    assert pair.state() == "aborted"
    pair.decode.pool.assert_idle()
    if submitted:
        assert pair.decode.errors["r"].code == TransferFailed.code
        assert "the cable was cut" in pair.decode.errors["r"].message
    pair.finish()


def test_corrupt_kv_reaches_the_request_as_an_error() -> None:
    pair = Pair(chunk_blocks=1)
    pair.answer("r", prompt(12), pair.bring_to("sending"))
    pair.exchange.cut(PREFILL, DECODE, "checksum", TransferCorrupted)
    pair.step(2)
    assert pair.decode.errors["r"].code == TransferCorrupted.code == "transfer_corrupted"
    assert "checksum" in pair.decode.errors["r"].message
    pair.finish()


def test_a_lost_lane_is_replaced_by_the_next_reservation() -> None:
    pair = Pair()
    pair.bring_to("reserved")
    pair.exchange.cut(PREFILL, DECODE, "the cable was cut")
    ticket = pair.start("again", prompt(9))
    pair.answer("again", prompt(9), ticket)
    pair.finish()
    assert pair.text("again") == expected(prompt(9)), "the loss of the old lane hit the new ticket"
    assert pair.state() == "aborted"


def test_a_late_chunk_never_lands_in_blocks_that_moved_on() -> None:
    pair = Pair(num_blocks=16, decode_blocks=3)
    pair.bring_to("reserved")
    pair.decode.engine.abort(["r"])
    ticket = pair.reserve("next", prompt(12, seed=9))
    pair.post.holding = False
    pair.read("next", prompt(12, seed=9), ticket)
    pair.step(4)
    assert pair.state("next") == "arrived"
    content = pair.decode.runner.gather(ticket.block_ids).tolist()
    pair.post.deliver()
    pair.step()
    assert pair.decode.runner.gather(ticket.block_ids).tolist() == content
    assert not pair.decode_role._transfers.busy(), "the late payload is still kept"


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
    tickets: dict[str, Ticket] = {}
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
            pair.exchange.cut(PREFILL, DECODE, "cut")
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
