from __future__ import annotations

import numpy as np
import pytest

from protos.values import SamplingParams
from tests.unit.workers.harness import VOCAB, WEIGHT, by_hand
from tests.unit.workers.toy import ToyRunner, toy_tokens
from workers.batch import Batch, Row, Sample

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
GREEDY = Sample(params=SamplingParams(temperature=0.0), index=0)


def row(block_ids: tuple[int, ...], start: int = 0, sample: Sample | None = GREEDY) -> Batch:
    return Batch(
        rows=(Row(request_id="r", token_ids=PROMPT[start:], start=start, block_tables=(block_ids,), sample=sample),)
    )


def test_the_answer_can_be_computed_on_paper() -> None:
    """One token, 4: its KV is (4 + 1) * 7919 + 0 = 39595; the weight adds 5 * 1000003, and all is modulo 65521."""
    assert toy_tokens([4], 1, weight=5, vocab_size=997) == ((39595 + 5000015) % 65521 % 997,)


def test_a_runner_reads_its_kv_through_the_block_table() -> None:
    runner = ToyRunner(WEIGHT, 4, VOCAB)
    expected = by_hand(PROMPT, 1)[0]
    assert runner.run(row((2, 0, 1))).rows[0].token_ids[0] == expected
    assert runner.run(row((2, 0, 1), start=8)).rows[0].token_ids[0] == expected
    for wrong in ((0, 2, 1), (2, 1, 0), (2, 3, 1)):  # in another order; a block that was never written
        assert runner.run(row(wrong, start=8)).rows[0].token_ids[0] != expected


def test_kv_moved_to_another_runner_goes_on_with_its_weight() -> None:
    prefill, decode = ToyRunner(11, 4, VOCAB), ToyRunner(WEIGHT, 4, VOCAB)
    first = prefill.run(row((0, 1, 2))).rows[0].token_ids[0]
    assert first == by_hand(PROMPT, 1, weight=11)[0] != by_hand(PROMPT, 1)[0]
    decode.scatter((7, 5, 3), prefill.gather((0, 1, 2)))
    again = decode.run(row((7, 5, 3), start=8)).rows[0].token_ids[0]
    assert again == by_hand(PROMPT, 1)[0]
    assert toy_tokens(PROMPT, 3, weight=WEIGHT, first_weight=11, vocab_size=VOCAB)[0] == first


def test_a_payload_is_a_copy() -> None:
    runner = ToyRunner(WEIGHT, 4, VOCAB)
    runner.run(row((0, 1, 2)))
    payload = runner.gather((0, 1))
    before = payload.copy()
    runner.scatter((0, 1), np.zeros_like(payload))
    assert (payload == before).all()
    assert (runner.gather((0, 1)) == 0).all()


def test_with_a_temperature_seed_and_index_count() -> None:
    def sampled(seed: int, temperature: float) -> tuple[int, ...]:
        return by_hand(PROMPT, 4, params=SamplingParams(seed=seed, temperature=temperature))

    assert sampled(1, 1.0) != sampled(2, 1.0)
    assert sampled(1, 0.0) == sampled(2, 0.0)


def test_banned_ids_are_not_chosen() -> None:
    runner = ToyRunner(WEIGHT, 4, VOCAB)
    expected = by_hand(PROMPT, 1)[0]
    banned = Sample(params=GREEDY.params, index=0, banned_ids=(expected,))
    assert runner.run(row((0, 1, 2), sample=banned)).rows[0].token_ids[0] == expected + 1
    assert runner.run(row((0, 1, 2), sample=None)).rows[0].token_ids == ()


def test_logprobs_come_as_asked() -> None:
    runner = ToyRunner(WEIGHT, 4, VOCAB)
    sample = Sample(params=SamplingParams(temperature=0.0, logprobs=2), index=0)
    out = runner.run(row((0, 1, 2), sample=sample)).rows[0]
    (logprobs,) = out.logprobs
    assert (logprobs.chosen.token_id,) == out.token_ids
    assert len(logprobs.top) == 2
    assert logprobs.top[0].logprob == pytest.approx(np.log(0.5))
