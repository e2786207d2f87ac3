"""A prefill worker: pushes while it reads, keeps a prompt's blocks as long as they are read from, and not longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.push_session import Session
from kvtransfer.transport import Sent
from protos.errors import IncompatibleWorkers, InvalidRequest, TransferFailed
from protos.values import FinishReason, SamplingParams
from tests.layouts import changed
from tests.unit.decode_pool.pair import (
    BLOCK_BYTES,
    DECODE,
    LAYOUT,
    LEASE_S,
    PREFILL,
    PREFILL_WEIGHT,
    VOCAB,
    Pair,
    expected,
    prompt,
)
from tests.unit.workers.toy import toy_tokens
from workers.scheduling.request import Request
from workers.transfer.send import Push, Shared


def num_held(pair: Pair) -> int:
    """Blocks of the prefill worker that somebody holds."""
    return pair.prefill.pool.num_blocks - pair.prefill.pool.num_free


def test_blocks_are_pushed_while_the_prompt_is_computed() -> None:
    pair = Pair(prefill_chunk=8, chunk_blocks=100)
    pair.post.holding = True
    ticket = pair.start("r", prompt(30))
    pushed = []
    for _ in range(5):
        pair.step()
        pushed.append(pair.post.num_carried)
    assert pushed == [0, 1, 2, 3, 4], "one push for each chunk of the prompt, a step behind it"
    assert pair.prefill.ended["r"] is FinishReason.PREFILLED
    pair.answer("r", prompt(30), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(30))


def test_a_long_prompt_travels_in_pieces() -> None:
    pair = Pair(chunk_blocks=3)
    pair.start("r", prompt(40))
    pair.step(2)
    assert pair.post.num_carried == 4  # 10 blocks


def test_its_own_cached_prefix_is_pushed_too() -> None:
    pair = Pair()
    tickets = {request_id: pair.start(request_id, prompt(18)) for request_id in ("first", "second")}
    assert [ticket.num_cached_tokens for ticket in tickets.values()] == [0, 0], "decode has adopted nothing yet"
    pair.step(3)
    assert pair.prefill.runner.num_computed == 18 + 2, "the second finds the four full blocks of the first"
    for request_id, ticket in tickets.items():
        pair.answer(request_id, prompt(18), ticket)
    pair.finish()
    assert pair.text("first") == pair.text("second") == expected(prompt(18))


def test_a_payload_is_a_copy_so_the_blocks_go_before_it_arrives() -> None:
    pair = Pair()
    pair.post.holding = True
    pair.start("r", prompt(12))
    pair.step()
    assert num_held(pair) == 3
    pair.step()
    assert num_held(pair) == 0
    assert pair.post.kept, "nothing has arrived yet"
    pair.finish()


def test_a_full_lane_holds_the_blocks_until_there_is_room() -> None:
    pair = Pair(staged_blocks=2, chunk_blocks=2)
    pair.post.holding = True
    ticket = pair.start("r", prompt(24))
    for num_delivered in range(3):
        pair.step(3)
        assert pair.post.num_carried == num_delivered + 1
        assert (num_held(pair) > 0) == (num_delivered < 2)
        assert pair.prefill.engine.has_work(), "the loop must keep ticking"
        pair.post.deliver(1)
    pair.answer("r", prompt(24), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(24))


@pytest.mark.parametrize("depth", [0, 1])
def test_kv_goes_on_its_way_while_a_step_reads_another_prompt(depth: int) -> None:
    """A lane's staging holds less than a long step brings: it is filled again as it empties, not once a step."""
    looks = 0

    def looked() -> bool:
        nonlocal looks
        looks += 1
        pair.post.deliver(1)
        return looks % 10 == 0

    pair = Pair(staged_blocks=2, chunk_blocks=2, depth=depth, looked=looked)
    pair.post.holding = True
    ticket = pair.start("r", prompt(24))
    pair.step(1 + depth)
    other = pair.start("other", prompt(40, seed=2))
    pair.step(1 + depth)
    assert pair.post.num_carried == 3, "all that was computed before the step, in spite of a full lane"
    for request_id, prompt_ids, its in (("r", prompt(24), ticket), ("other", prompt(40, seed=2), other)):
        pair.answer(request_id, prompt_ids, its)
    pair.finish()
    assert pair.text("r") == expected(prompt(24))
    assert pair.text("other") == expected(prompt(40, seed=2))


def test_a_preempted_prompt_is_not_pushed_during_its_step() -> None:
    pair = Pair(num_blocks=16, staged_blocks=2, chunk_blocks=2)
    pair.post.holding = True
    pair.start("r", prompt(24))
    pair.step()
    pair.prefill_role.tick(pair.now, 0)
    assert pair.prefill_role.is_behind(), "its lane is full"
    [push] = pair.prefill_role.outgoing._pushes.values()
    request = push.source
    assert isinstance(request, Request)
    block_ids, request.block_ids, request.num_computed = request.block_ids, [], 0
    pair.post.deliver(1)
    assert not pair.prefill_role.is_behind()
    pair.prefill_role.advance_transfers(pair.now, 0)
    assert pair.post.num_carried == 1
    request.block_ids, request.num_computed = block_ids, 24


def test_a_step_that_decodes_is_not_looked_at() -> None:
    """It is short, and looking costs it time."""
    looks: list[None] = []
    pair = Pair(staged_blocks=2, chunk_blocks=2, looked=lambda: looks.append(None) is None)
    pair.read("here", prompt(8), None, max_tokens=20)
    pair.step()
    pair.post.holding = True
    pair.start("r", prompt(24, seed=2))
    pair.step()
    looks.clear()
    pair.step(3)
    assert not looks
    pair.finish()


def test_a_slow_lane_does_not_hold_up_other_prompts() -> None:
    pair = Pair(staged_blocks=1)
    pair.post.holding = True
    pair.start("slow", prompt(24))
    pair.step(2)
    pair.start("r", prompt(9, seed=2))
    pair.step()
    assert pair.prefill.tokens["r"] == expected(prompt(9, seed=2), 1)
    pair.finish()


def test_nothing_is_held_when_the_destination_has_it_all() -> None:
    pair = Pair(prefill_chunk=4)
    before = pair.start("before", prompt(8))
    pair.answer("before", prompt(8), before)
    pair.finish()
    num_carried = pair.post.num_carried
    ticket = pair.start("r", prompt(8))
    assert ticket.block_ids == ()
    pair.prefill.pool.clear()
    pair.step(2)
    assert pair.prefill.ended["r"] is FinishReason.PREFILLED
    assert num_held(pair) == 0
    assert pair.post.num_carried == num_carried
    pair.answer("r", prompt(8), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(8))


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    """The gateway then withdraws the reservation."""
    pair = Pair()
    ticket = pair.reserve("r", prompt(12))
    pair.read("r", prompt(12), ticket, max_tokens=1)
    pair.step(2)
    assert pair.prefill.ended["r"] is FinishReason.LENGTH
    assert num_held(pair) == 0
    assert pair.decode.engine.abort(["r"]) == 1
    pair.assert_idle()


def test_a_request_without_a_ticket_is_answered_here() -> None:
    pair = Pair()
    pair.read("r", prompt(9), None)
    pair.finish()
    assert pair.prefill.tokens["r"] == toy_tokens(prompt(9), 6, weight=PREFILL_WEIGHT, vocab_size=VOCAB)
    assert pair.prefill.ended["r"] is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5])
def test_an_abort_at_any_moment_leaves_nothing(num_steps: int) -> None:
    """Waiting, in the middle of the prompt, held, and gone."""
    pair = Pair(prefill_chunk=8, staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    pair.start("r", prompt(24))
    pair.step(num_steps)
    pair.prefill.engine.abort(["r"])
    pair.step()
    assert num_held(pair) == 0
    assert not pair.prefill.engine.has_work(), "what had not left yet was not dropped"
    pair.decode.engine.abort(["r"])
    pair.finish()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_lost_lane_fails_its_requests_and_no_others(num_steps: int) -> None:
    pair = Pair(prefill_chunk=8, staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    pair.start("r", prompt(24))
    pair.read("other", prompt(9, seed=2), None)
    pair.step(num_steps)
    pair.exchange.cut(PREFILL, DECODE, "the cable was cut")
    pair.step()
    error = pair.prefill.errors["r"]
    assert error.code == TransferFailed.code
    assert "d0#1 was lost: the cable was cut" in error.message
    pair.finish()
    assert "other" not in pair.prefill.errors
    assert pair.prefill.ended["other"] is FinishReason.LENGTH


def test_a_lost_destination_is_found_before_prefill() -> None:
    pair = Pair()
    ticket = pair.reserve("r", prompt(24))
    pair.decode_role._transfers.close()
    pair.read("r", prompt(24), ticket)
    pair.step(2)
    assert pair.prefill.errors["r"].code == TransferFailed.code
    assert num_held(pair) == 0


def test_a_prompt_may_wait_longer_than_a_renewed_lease() -> None:
    pair = Pair(max_num_seqs=1)
    pair.read("first", prompt(9, seed=2), None, max_tokens=20)
    pair.step()
    ticket = pair.start("r", prompt(12))
    for _ in range(5):
        pair.step(seconds=0.7 * LEASE_S)
        assert pair.reserve("r", prompt(12)) == ticket
    assert pair.prefill.tokens["r"] == (), "it has not waited"
    pair.answer("r", prompt(12), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(12))


def test_a_prompt_may_take_longer_than_a_renewed_lease() -> None:
    pair = Pair(prefill_chunk=4)
    ticket = pair.start("r", prompt(40))
    while "r" not in pair.prefill.ended:
        pair.step(seconds=0.7 * LEASE_S)
        pair.prefill.step(pair.now + 2 * LEASE_S)
        pair.reserve("r", prompt(40))
    pair.answer("r", prompt(40), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(40))


def test_an_expired_ticket_gets_no_prefill() -> None:
    pair = Pair(staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    pair.start("r", prompt(12))
    pair.step(2)
    pair.step(seconds=LEASE_S)
    assert pair.prefill.errors["r"].code == TransferFailed.code
    assert "lease of 50 s is over" in pair.prefill.errors["r"].message
    assert num_held(pair) == 0
    pair.finish()


def test_a_push_may_take_longer_than_a_lease_as_long_as_it_moves() -> None:
    pair = Pair(staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    ticket = pair.start("r", prompt(16))
    pair.step(2)
    for _ in range(4):
        pair.step(seconds=0.7 * LEASE_S)
        pair.post.deliver(1)
        pair.step()
    pair.answer("r", prompt(16), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(16))


def test_a_lost_lane_does_not_affect_others() -> None:
    pair = Pair(staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    elsewhere = replace(DECODE, worker_id="d1")
    pair.exchange.receiver(elsewhere, LAYOUT)
    ticket = pair.start("r", prompt(12))
    pair.read("other", prompt(12, seed=2), replace(ticket, ticket_id="other", destination=elsewhere))
    pair.step(3)
    pair.exchange.cut(PREFILL, elsewhere, "the cable was cut")
    pair.step()
    assert pair.prefill.errors.keys() == {"other"}
    pair.answer("r", prompt(12), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(12))


@pytest.mark.parametrize(("reserved", "read"), [(12, 13), (12, 8), (13, 12)])
def test_a_ticket_for_another_prompt_is_refused(reserved: int, read: int) -> None:
    pair = Pair()
    ticket = pair.reserve("r", prompt(reserved))
    pair.read("r", prompt(read), ticket)
    pair.step(2)
    assert pair.prefill.errors["r"].code == InvalidRequest.code
    assert pair.prefill.errors["r"].param == "ticket"
    assert pair.prefill.runner.num_computed == 0
    pair.finish()


def test_a_ticket_of_another_layout_is_refused_by_field() -> None:
    pair = Pair()
    ticket = pair.reserve("r", prompt(12))
    pair.read("r", prompt(12), replace(ticket, layout=changed(ticket.layout, num_layers=7)))
    pair.step(2)
    assert pair.prefill.errors["r"].code == IncompatibleWorkers.code
    assert "num_layers is 1 there and 7 here" in pair.prefill.errors["r"].message
    pair.finish()


def test_one_ticket_is_for_one_request() -> None:
    pair = Pair()
    ticket = pair.start("r", prompt(12))
    pair.read("s", prompt(12), ticket)
    pair.step(3)
    assert pair.prefill.errors["s"].code == InvalidRequest.code
    assert "r" not in pair.prefill.errors
    pair.decode.engine.abort(["r"])
    pair.finish()


def test_a_newer_generation_ends_the_push_of_the_older() -> None:
    pair = Pair(staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    pair.start("r", prompt(12))
    pair.step(2)
    ticket = pair.reserve("r", prompt(12), generation=2)
    pair.read("r2", prompt(12), ticket)
    pair.step(2)
    assert pair.prefill.errors["r"].code == TransferFailed.code
    pair.answer("r", prompt(12), ticket)
    pair.finish()
    assert pair.prefill.tokens["r2"] + pair.decode.tokens["r"] == expected(prompt(12))


def test_a_preempted_prompt_is_read_again_and_arrives_once() -> None:
    pair = Pair(num_blocks=8, decode_blocks=64, prefill_chunk=2)
    pair.read("old", prompt(8, seed=3), None, max_tokens=20)
    pair.step(6)
    ticket = pair.start("r", prompt(16))
    pair.answer("r", prompt(16), ticket)
    pair.finish()
    assert pair.prefill.scheduler.num_preemptions > 0
    assert pair.text("r") == expected(prompt(16))
    assert pair.prefill.engine.load().transfer_bytes == 4 * BLOCK_BYTES


def test_the_last_step_of_a_prompt_pushes_while_it_is_computed() -> None:
    pair = Pair(follows_layers=True, prefill_chunk=8)
    ticket = pair.start("r", prompt(21))
    for num_carried in (0, 1, 3):
        pair.prefill.step(pair.now)
        assert pair.post.num_carried == num_carried
    assert pair.prefill.ended == {"r": FinishReason.PREFILLED}
    assert num_held(pair) == 0
    pair.answer("r", prompt(21), ticket)
    pair.finish()
    assert pair.text("r") == expected(prompt(21))


def test_a_prompt_is_pushed_once_its_lane_has_room() -> None:
    pair = Pair(follows_layers=True, staged_blocks=1, chunk_blocks=1)
    pair.post.holding = True
    prompts = {"first": prompt(4), "second": prompt(8, seed=2)}
    tickets = {}
    for request_id, prompt_ids in prompts.items():
        tickets[request_id] = pair.start(request_id, prompt_ids)
        pair.step()
        assert pair.post.num_carried == 1
    for request_id, prompt_ids in prompts.items():
        pair.answer(request_id, prompt_ids, tickets[request_id])
    pair.finish()
    for request_id, prompt_ids in prompts.items():
        assert pair.text(request_id) == expected(prompt_ids)


@pytest.mark.parametrize(
    ("completed_s", "ended_s", "hidden_s"), [(None, 5.0, 2.0), (6.0, 5.0, 2.0), (4.0, 5.0, 1.0), (1.0, 5.0, 0.0)]
)
def test_a_chunk_is_hidden_while_its_prompt_is_computed(
    completed_s: float | None, ended_s: float, hidden_s: float
) -> None:
    """Two seconds on the lane."""
    ticket = Pair().reserve("r", prompt(4))
    session = Session(ticket, max_chunk_blocks=1)
    chunk = session.next_chunk(4, complete=True)
    assert chunk is not None
    request = Request(request_id="r", prompt_ids=prompt(4), sampling=SamplingParams())
    sent = Sent(chunk=chunk, num_bytes=1, elapsed_s=2.0, ended_s=ended_s)
    assert Push(request, session, begun_s=0.0, completed_s=completed_s).hidden_s(sent) == hidden_s
    shared = Shared(tables=((),), num_tokens=4, num_here=4)
    assert Push(shared, session, begun_s=0.0, completed_s=completed_s).hidden_s(sent) == 0.0  # there is no prompt


def test_load_counts_sent_bytes() -> None:
    pair = Pair()
    pair.post.holding = True
    pair.start("r", prompt(12))
    pair.step()
    assert pair.prefill.engine.load().num_tickets == 1
    assert pair.prefill.engine.load().transfer_bytes == 0
    pair.finish()
    assert pair.prefill.engine.load().num_tickets == 0
    assert pair.prefill.engine.load().transfer_bytes == 3 * BLOCK_BYTES
