"""Text comes out whole: no broken character, nothing that changes later, the same as decoding everything at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted import Family, byte_level, ids_of, sentencepiece

FAMILIES = [byte_level, sentencepiece]

texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("🙂👩‍👩‍👧é你 \n")).filter(
    lambda text: "\ufffd" not in text
)


def fed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer.vocabulary, **options)
    return [detokenizer.feed(token_id) for token_id in ids]


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts)
def test_any_text_comes_out_as_decoding_it_at_once(family: Family, text: str) -> None:
    tokenizer = family()
    ids = ids_of(text, tokenizer)
    pieces = fed(tokenizer, ids, at_start=True)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(pieces)


@given(ids=st.lists(st.integers(0, 520), max_size=40))
@example(ids=[173, 98])
def test_any_tokens_come_out_as_decoding_them_at_once(ids: list[int]) -> None:
    """Also bytes that are no text; only what the end has cut off is left out: at most three bytes that could have
    become a character, or half of a surrogate (ED A0), which Python's decoder waits for as well."""
    tokenizer = byte_level()
    said, whole = "".join(fed(tokenizer, ids)), tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.startswith(said)
    assert whole[len(said) :] in ("", "\ufffd", "\ufffd\ufffd")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_character_appears_with_its_last_byte(family: Family) -> None:
    tokenizer = family()
    ids = ids_of("🦊", tokenizer)
    assert len(ids) >= 3
    pieces = fed(tokenizer, ids, at_start=True)
    assert pieces[-1] == "🦊"
    assert not any(pieces[:-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_half_a_character_at_the_end_is_left_out(family: Family) -> None:
    tokenizer = family()
    assert "".join(fed(tokenizer, ids_of("a🦊", tokenizer)[:-1], at_start=True)) == "a"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    tokenizer = byte_level()
    first, *rest = ids_of("🦊")
    [end] = ids_of("<|end|>")
    assert "".join(fed(tokenizer, [first, end, *rest])) == "🦊"


def test_special_tokens_are_shown_on_demand() -> None:
    tokenizer = byte_level()
    ids = ids_of("hello<|end|>")
    assert "".join(fed(tokenizer, ids)) == "hello"
    assert "".join(fed(tokenizer, ids, skip_special_tokens=False)) == "hello<|end|>"


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece()
    ids = ids_of("the", tokenizer)
    assert "".join(fed(tokenizer, ids)) == " the"
    assert "".join(fed(tokenizer, ids, at_start=True)) == "the"


def test_ids_without_a_token_say_nothing() -> None:
    assert fed(byte_level(), [100_000]) == [""]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_plain_amid_a_character(family: Family) -> None:
    tokenizer = family()
    detokenizer, special = Detokenizer(tokenizer.vocabulary), min(tokenizer.vocabulary.special)
    assert detokenizer.is_clear
    for token_id in ids_of("🦊", tokenizer)[:-1]:
        detokenizer.feed(token_id)
    detokenizer.feed(special)
    assert not detokenizer.is_clear
