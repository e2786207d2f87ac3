"""What an answer must be, as grammars that can be compiled."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from protos.errors import InvalidRequest
from router.text.structure import GrammarChecks, choice_grammar, json_grammar


def test_a_choice_may_have_any_character() -> None:
    chars = [*map(chr, range(0x300)), "\u2028", "\ud7ff", "\ue000", "\U0010ffff"]
    assert LLMatcher.validate_grammar(choice_grammar([f"a{char}" for char in chars])) == ""


async def test_what_no_worker_can_compile_is_refused_here() -> None:
    rules = [f"A{i}: (A{i + 1} & /.*{i}x.*/)" for i in range(20)]
    with pytest.raises(InvalidRequest, match=r"cannot be enforced.*fuel"):
        await GrammarChecks().check("\n".join(["start: A0", *rules, "A20: /.*/"]), param="grammar")


async def test_definitions_that_lead_from_one_to_the_next_end_no_process() -> None:
    """77 kB of them, which a stack of the usual size is too small for."""
    definitions: dict[str, Any] = {f"x{i}": {"$ref": f"#/$defs/x{i - 1}"} for i in range(1, 2500)}
    definitions["x0"] = {"type": "string"}
    await GrammarChecks().check(json_grammar({"$defs": definitions, "$ref": "#/$defs/x2499"}), param="json")
