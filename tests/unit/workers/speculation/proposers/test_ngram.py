"""Drafts from the sequence itself: the longest match decides, and the index grows with the answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest

from workers.speculation.proposers.ngram import MAX_MATCH, MatchIndex


def longest_by_hand(tokens: tuple[int, ...]) -> int:
    stop = len(tokens)
    lengths = [
        next((n for n in range(min(MAX_MATCH, place)) if tokens[place - 1 - n] != tokens[stop - 1 - n]), None)
        for place in range(1, stop)
    ]
    return max((min(MAX_MATCH, place) if n is None else n for place, n in enumerate(lengths, 1)), default=0)


@pytest.mark.parametrize("num_prompt", [0, 2, 40, 120])
def test_the_longest_match_is_found_wherever_it_is(num_prompt: int) -> None:
    rng = Random(num_prompt)
    tokens = tuple(rng.randrange(3) for _ in range(150))
    index = MatchIndex(tokens[:num_prompt])
    for stop in range(num_prompt + 1, 151):
        index.extend(tokens[stop - 1 : stop])
        place, length = index.longest_match()
        assert length == longest_by_hand(tokens[:stop])
        if length:
            assert tokens[place - length : place] == tokens[stop - length : stop]
            assert index.after(place, 4)[:1] == tokens[place : place + 1]


def test_of_equal_matches_the_latest_counts() -> None:
    index = MatchIndex((1, 2, 3, 8, 0, 1, 2, 3, 9, 0, 5))
    index.extend((1, 2, 3))
    place, length = index.longest_match()
    assert (index.after(place, 2), length) == ((9, 0), 3)


def test_one_matching_token_suffices() -> None:
    """The latest place in the answer, else the latest in the prompt."""
    index = MatchIndex((7, 20, 8, 7, 30, 1, 9, 40))
    index.extend((7,))
    place, length = index.longest_match()
    assert (index.after(place, 2), length) == ((30, 1), 1)
    index.extend((50, 9, 7))
    place, length = index.longest_match()
    assert (index.after(place, 2), length) == ((50, 9), 1)
    index.extend((50,))
    place, length = index.longest_match()
    assert (index.after(place, 2), length) == ((9, 7), 2)


def test_a_draft_goes_on_with_the_period_of_a_repetition() -> None:
    index = MatchIndex((9, 9, 1, 2, 1, 2, 1))
    place, _ = index.longest_match()
    assert index.after(place, 5) == (2, 1, 2, 1, 2)


def test_a_step_costs_the_same_after_1k_and_32k_tokens() -> None:
    """Counted in executed lines: no clock, on which a busy machine would be told."""
    rng = Random(0)
    tokens = tuple(rng.randrange(100) for _ in range(2**15))

    def lines_of_100_steps(index: MatchIndex) -> int:
        num_lines = 0

        def count(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal num_lines
            num_lines += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            for token_id in tokens[100:200]:
                index.extend((token_id,))
                index.after(index.longest_match()[0], 8)
        finally:
            sys.settrace(before)
        return num_lines

    short, long = lines_of_100_steps(MatchIndex(tokens[:1_000])), lines_of_100_steps(MatchIndex(tokens))
    assert 0 < long < 1.5 * short
