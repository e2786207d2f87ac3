"""What an answer must be, as grammars that can be compiled."""

from __future__ import annotations

import asyncio
import gc
from subprocess import Popen
from typing import Any

import pytest
from llguidance import LLMatcher

from protos.errors import InvalidRequest
from router.text import checks
from router.text.checks import GrammarChecks
from router.text.structure import choice_grammar, json_grammar, regex_grammar


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


async def test_a_grammar_that_takes_long_is_ended_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of intersections the library counts the work as one, and does not stop."""
    monkeypatch.setattr(checks, "CPU_S", 0.1)
    rules = [f"A{i}: (A{i + 1} & /.*[{chr(97 + i % 26)}{i % 10}].*/)" for i in range(150)]
    checking = GrammarChecks()
    grammars = ["\n".join([f"start: A{i}", *rules, "A150: /.*/"]) for i in range(2)]
    asked = [checking.check(grammar, param="grammar") for grammar in grammars]
    ended, *_, fine = await asyncio.gather(
        *asked, *(checking.check(f'start: "{name}"', param="grammar") for name in "ab"), return_exceptions=True
    )
    assert fine is None
    assert isinstance(ended, InvalidRequest)
    assert "takes more than 0.1 s" in ended.message
    with pytest.raises(InvalidRequest, match="takes more than"):
        await checking.check(grammars[0], param="grammar")


async def test_one_that_ends_its_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_AT_ONCE", 1)
    made: list[Any] = []
    monkeypatch.setattr(
        checks.subprocess, "Popen", lambda *args, **options: made.append(Popen(*args, **options)) or made[-1]
    )
    checking = GrammarChecks()
    await checking.check('start: "a"', param="grammar")
    made[0].kill()
    made[0].wait()
    with pytest.raises(InvalidRequest, match="too much memory"):
        await checking.check('start: "b"', param="grammar")
    await checking.check('start: "c"', param="grammar")
    del checking
    gc.collect()
    assert len(made) == 2
    made[1].wait(60)  # it ends with who asks it


async def test_definitions_that_lead_from_one_to_the_next_end_no_process() -> None:
    """77 kB of them, which a stack of the usual size is too small for."""
    definitions: dict[str, Any] = {f"x{i}": {"$ref": f"#/$defs/x{i - 1}"} for i in range(1, 2500)}
    definitions["x0"] = {"type": "string"}
    await GrammarChecks().check(json_grammar({"$defs": definitions, "$ref": "#/$defs/x2499"}), param="json")
