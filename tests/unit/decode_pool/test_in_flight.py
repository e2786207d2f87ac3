"""Hand-overs between workers that have steps in flight: the same answers, and no block is anybody's too early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.values import FinishReason
from tests.unit.decode_pool.pair import NUM_ANSWER, Pair, expected, prompt


@pytest.mark.parametrize("follows_layers", [False, True], ids=["by steps", "by layers"])
@pytest.mark.parametrize("depth", [1, 2])
def test_prefill_makes_the_first_token_and_decode_the_rest(depth: int, follows_layers: bool) -> None:
    pair = Pair(depth=depth, follows_layers=follows_layers, prefill_chunk=8)
    asked = {f"r{length}": prompt(length) for length in (1, 4, 11, 21, 30)}
    for name, prompt_ids in asked.items():
        pair.answer(name, prompt_ids, pair.start(name, prompt_ids))
    pair.finish()
    for name, prompt_ids in asked.items():
        assert pair.text(name) == expected(prompt_ids)
        assert pair.prefill.ended[name] is FinishReason.PREFILLED
    computed = pair.decode.runner.num_computed
    assert computed == len(asked) * (NUM_ANSWER - 1), "decode computed a prompt token, or went beyond a known end"


@settings(max_examples=40)
@given(
    depth=st.integers(1, 2),
    follows_layers=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    pauses=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    aborted=st.sets(st.integers(0, 4)),
    held=st.booleans(),
)
def test_whoever_is_aborted_whenever_the_others_are_answered(
    depth: int, follows_layers: bool, lengths: list[int], pauses: list[int], aborted: set[int], held: bool
) -> None:
    """The pools hold a few of them at a time; integrity is checked after every step."""
    pair = Pair(depth=depth, follows_layers=follows_layers, num_blocks=40, decode_blocks=80, prefill_chunk=8)
    pair.post.holding = held
    for index, length in enumerate(lengths):
        name = f"r{index}"
        pair.answer(name, prompt(length), pair.start(name, prompt(length)))
        pair.step(pauses[index])
    gone = {f"r{index}" for index in aborted if index < len(lengths)}
    for side in (pair.prefill, pair.decode):
        side.engine.abort(gone)
    pair.finish()
    for index, length in enumerate(lengths):
        if f"r{index}" not in gone:
            assert pair.text(f"r{index}") == expected(prompt(length))
