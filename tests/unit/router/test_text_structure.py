"""What an answer must be, as grammars that can be compiled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from llguidance import LLMatcher

from protos.errors import InvalidRequest, Overloaded
from router.text import structure
from router.text.structure import GrammarChecks, choice_grammar, json_grammar, regex_grammar


def test_a_choice_may_have_any_character() -> None:
    chars = [*map(chr, range(0x300)), "\u2028", "\ud7ff", "\ue000", "\U0010ffff"]
    assert LLMatcher.validate_grammar(choice_grammar([f"a{char}" for char in chars])) == ""


async def test_what_no_worker_can_compile_is_refused_here() -> None:
    rules = [f"A{i}: (A{i + 1} & /.*{i}x.*/)" for i in range(20)]
    with pytest.raises(InvalidRequest, match=r"cannot be enforced.*fuel"):
        await GrammarChecks().check("\n".join(["start: A0", *rules, "A20: /.*/"]), param="grammar")


async def test_what_is_wrong_is_told_in_few_words() -> None:
    with pytest.raises(InvalidRequest) as failed:
        await GrammarChecks().check(regex_grammar("(" * 50_000), param="regex")
    assert len(failed.value.message) < 2000


async def test_nobody_waits_for_ever_behind_a_grammar_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(structure, "CHECK_S", 0.05)
    monkeypatch.setattr(structure, "_what_is_wrong", lambda grammar: "" if go_on.wait(30) else "stuck")
    checks = GrammarChecks()
    asked = [checks.check(f'start: "{name}"', param="grammar") for name in "ab"]
    refused = await asyncio.gather(*asked, return_exceptions=True)
    go_on.set()
    assert all(isinstance(one, Overloaded) for one in refused)
    monkeypatch.setattr(structure, "CHECK_S", 30.0)
    await checks.check('start: "a"', param="grammar")


async def test_definitions_that_lead_from_one_to_the_next_end_no_process() -> None:
    """77 kB of them, which a stack of the usual size is too small for."""
    definitions: dict[str, Any] = {f"x{i}": {"$ref": f"#/$defs/x{i - 1}"} for i in range(1, 2500)}
    definitions["x0"] = {"type": "string"}
    await GrammarChecks().check(json_grammar({"$defs": definitions, "$ref": "#/$defs/x2499"}), param="json")
