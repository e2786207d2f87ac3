"""Stop strings are found wherever the pieces are cut, and nothing of them is ever shown."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings

letters = st.text("ab ", max_size=30)
stops = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4)


def shown(pieces: list[str], stop: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The text that a client gets of the pieces, and the stop string found."""
    matcher, said = StopStrings(stop, include=include), ""
    for piece in pieces:
        said += matcher.feed(piece)
        if matcher.found is not None:
            return said, matcher.found
    return said + matcher.flush(), None


@given(text=letters, stop=stops, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_the_cuts_make_no_difference(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert shown(pieces, stop, include=include) == shown([text], stop, include=include)


@given(text=letters, stop=stops)
def test_a_stop_string_is_found_if_and_only_if_it_is_there(text: str, stop: list[str]) -> None:
    said, stopped_by = shown(list(text), stop)
    assert (stopped_by is not None) == any(string in text for string in stop)
    if stopped_by is None:
        assert said == text
    else:
        assert text.startswith(said + stopped_by)
        assert not any(string in said for string in stop)
        assert not any(string in (said + stopped_by)[:-1] for string in stop), "another one was complete before"


def test_only_possible_beginnings_are_held_back() -> None:
    matcher = StopStrings(["END", "NDX"])
    assert matcher.feed("the E") == "the "
    assert matcher.feed("N") == ""
    assert matcher.feed("o") == "ENo"
    assert matcher.feed("EN") == ""
    assert matcher.feed("DX") == ""
    assert matcher.found == "END"


def test_text_that_goes_on_behind_the_stop_string_is_dropped() -> None:
    assert shown(["one STOP two"], ["STOP"]) == ("one ", "STOP")
    assert shown(["one STOP two"], ["STOP"], include=True) == ("one STOP", "STOP")


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).feed("abc") == "abc"


@pytest.mark.parametrize("order", [["b", "ab"], ["ab", "b"]])
def test_of_two_that_are_complete_at_once_the_longest_counts(order: list[str]) -> None:
    assert shown(["aab"], order) == ("a", "ab")
