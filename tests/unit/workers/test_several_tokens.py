"""Rows that bring several tokens: drafts are verified; what was computed for rejected ones counts as not computed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protos.values import FinishReason, SequenceUpdate
from tests.unit.workers.harness import BLOCK, ToyEngine, ask, by_hand
from workers.batch import Batch

PROMPT = (3, 1, 4, 1, 5)
ANSWER = by_hand(PROMPT, 12)
WRONG = 996


def first_token(**sampling: int) -> ToyEngine:
    toy = ToyEngine()
    toy.submit(ask("r", PROMPT, **({"max_tokens": 12} | sampling)))
    assert toy.step()[0].token_ids == ANSWER[:1]
    return toy


def verify(toy: ToyEngine, *draft_ids: int) -> list[SequenceUpdate]:
    batch = toy.scheduler.plan(toy.now)
    assert batch is not None
    batch = Batch(rows=(replace(batch.rows[0], draft_ids=draft_ids),))
    updates = toy.scheduler.apply(batch, toy.runner.run(batch))
    for update in updates:
        toy.answers[update.request_id].add(update)
    toy.engine.check_integrity()
    return updates


@pytest.mark.parametrize(
    ("draft_ids", "num_tokens"),
    [((), 1), (ANSWER[1:3], 3), ((ANSWER[1], WRONG), 2), ((WRONG, ANSWER[2]), 1)],
)
def test_a_row_brings_accepted_drafts_and_one_more_token(draft_ids: tuple[int, ...], num_tokens: int) -> None:
    toy = first_token()
    (update,) = verify(toy, *draft_ids)
    assert update.token_ids == ANSWER[1 : 1 + num_tokens]
    (request,) = toy.scheduler.running
    assert request.num_computed == request.num_planned == len(PROMPT) + num_tokens
    assert request.num_sealed == request.num_computed // BLOCK, "no block is sealed that holds a rejected token"
    assert toy.finish()["r"].token_ids == ANSWER


def test_a_rejected_draft_is_in_no_block_that_others_find() -> None:
    toy = first_token()
    verify(toy, ANSWER[1], WRONG)
    other = (*PROMPT, *ANSWER[:2], WRONG)
    toy.submit(ask("other", (*other, 9), max_tokens=2))
    toy.step()
    assert toy.answers["other"].cached[0] == BLOCK, "the first block alone is theirs"
    answers = toy.finish()
    assert answers["r"].token_ids == ANSWER
    assert answers["other"].token_ids == by_hand((*other, 9), 2)


def test_an_answer_ends_at_the_first_token_that_ends_it() -> None:
    toy = first_token(max_tokens=3)
    (update,) = verify(toy, *ANSWER[1:3])
    assert (update.token_ids, update.finish_reason) == (ANSWER[1:3], FinishReason.LENGTH)
    toy.engine.assert_idle()
    toy = ToyEngine(eos_ids=(ANSWER[1],))
    toy.submit(ask("r", PROMPT, max_tokens=12))
    toy.step()
    (update,) = verify(toy, *ANSWER[1:3])
    assert (update.token_ids, update.finish_reason) == (ANSWER[1:2], FinishReason.STOP)
    toy.engine.assert_idle()


def test_logprobs_come_with_each_token() -> None:
    toy = ToyEngine()
    toy.submit(ask("r", PROMPT, max_tokens=12, logprobs=1))
    toy.step()
    (update,) = verify(toy, ANSWER[1], WRONG)
    assert tuple(entry.chosen.token_id for entry in update.logprobs) == update.token_ids == ANSWER[1:3]


def test_a_runner_brings_a_token_a_row_unless_it_declares_more() -> None:
    with pytest.raises(AssertionError, match="the pipeline takes 1 steps at once"):
        ToyEngine().engine.advance(0.0, num_steps=2)
