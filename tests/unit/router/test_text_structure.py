"""What an answer must be, as grammars that can be compiled."""

from __future__ import annotations

from llguidance import LLMatcher

from router.text.structure import choice_grammar


def test_a_choice_may_have_any_character() -> None:
    chars = [*map(chr, range(0x300)), "\u2028", "\ud7ff", "\ue000", "\U0010ffff"]
    assert LLMatcher.validate_grammar(choice_grammar([f"a{char}" for char in chars])) == ""
