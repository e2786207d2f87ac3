"""Structures of answers as grammars that can be compiled."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import threading
from collections.abc import Callable
from subprocess import Popen
from typing import Any

import pytest
from llguidance import LLMatcher

from protos.errors import BatonError, InvalidRequest, Overloaded
from protos.limited.limited_process import LimitedProcess
from router.text.grammar import checker
from router.text.grammar.checker import GrammarChecks
from router.text.grammar.structure import choice_grammar, inline_json, json_grammar, lark_grammar, regex_grammar
from tests.unit.router.faces.openai.test_tools import fits


def test_a_choice_may_have_any_character() -> None:
    chars = [*map(chr, range(0x300)), "\u2028", "\ud7ff", "\ue000", "\U0010ffff"]
    assert LLMatcher.validate_grammar(choice_grammar([f"a{char}" for char in chars])) == ""


async def test_grammars_workers_cannot_compile_are_refused() -> None:
    rules = [f"A{i}: (A{i + 1} & /.*{i}x.*/)" for i in range(20)]
    with pytest.raises(InvalidRequest, match=r"cannot be enforced.*fuel"):
        await GrammarChecks().check("\n".join(["start: A0", *rules, "A20: /.*/"]), param="grammar")


async def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    """The message names the keyword or the value."""
    checking = GrammarChecks()
    wrong: dict[str, dict[str, Any]] = {
        "minLength": {"type": "string", "minLength": 5, "maxLength": 2},
        "const": {"type": "string", "const": 1},
        "nul": {"type": ["string", "nul"]},
        "oneOf": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "not": {"items": {"not": {}}},
        "object": {"anyOf": [{"type": "null"}, 5]},
        "required": {"required": [1]},
        "minimum": {"minimum": "1"},
        "enum": {"enum": 5},
        "(": {"type": "string", "pattern": "("},
        "day": {"format": "day", "type": "string"},
        "/$defs/c": {"$ref": "#/$defs/c"},
        "http://c/d": {"$ref": "http://c/d"},
    }
    for named, schema in wrong.items():
        with pytest.raises(InvalidRequest) as failed:
            await checking.check(json_grammar(schema), param="json")
        assert failed.value.param == "json"
        assert named in failed.value.message
    checking.close()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= "a" | other', "other"),
        ('top ::= "a"', "root"),
        ("root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "nested too deeply"),
        ("\n".join(f"r{number} ::= r{number + 1}" for number in range(400)), "at most 4096"),
    ],
)
def test_an_ebnf_grammar_that_cannot_be_read_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        lark_grammar(grammar)
    assert refused.value.param == "structured_outputs.grammar"


def test_a_lark_grammar_may_speak_of_ebnf() -> None:
    assert lark_grammar('start: "a ::= b"') == 'start: "a ::= b"'


@pytest.mark.parametrize("grammar_of", [json_grammar, lambda schema: f"start: {inline_json(schema)}"])
def test_names_and_formats_of_openapi_are_read(grammar_of: Callable[[Any], str]) -> None:
    named = {name: {"type": "integer", "format": "int64"} for name in ("Foo[int]", "Maß", "a<b>", "x%5By")}
    properties = {name: {"$ref": f"#/$defs/{name.replace('%', '%25')}"} for name in named} | {
        "format": {"type": "string", "format": "password"},
        "of": {"const": {"format": "byte", "$ref": "[1]"}},
    }
    schema = {"$defs": named, "type": "object", "properties": properties, "required": list(properties)}
    grammar = grammar_of(schema)
    assert LLMatcher.validate_grammar(grammar) == ""
    assert fits(grammar, '{"Foo[int]":1,"Maß":2,"a<b>":3,"x%5By":4,"format":"x","of":{"format":"byte","$ref":"[1]"}}')


@pytest.mark.parametrize("grammar_of", [json_grammar, lambda schema: f"start: {inline_json(schema)}"])
def test_an_integer_ends_within_64_bits(grammar_of: Callable[[Any], str]) -> None:
    for more in ({}, {"minimum": 0}, {"exclusiveMaximum": 2**62}, {"multipleOf": 1}, {"type": ["integer", "null"]}):
        grammar = grammar_of({"type": "integer"} | more)
        assert fits(grammar, "4123456789012345678")
        assert not fits(grammar, "9223372036854775809")
    assert fits(grammar_of({"type": "integer"}), "-9223372036854774000")
    assert fits(grammar_of({"type": "integer", "const": 7}), "7")
    assert fits(grammar_of({"type": ["integer", "number"]}), "1e300")


def test_a_schema_does_not_say_how_json_is_written() -> None:
    """Neither how much white space there may be, nor how much is enforced."""
    schema = {"type": "object", "properties": {"x-guidance": {"type": "string"}}}
    loose = schema | {"x-guidance": {"whitespace_pattern": " *", "coerce_one_of": True}}
    for grammar_of in (json_grammar, inline_json):
        with pytest.raises(InvalidRequest, match=r"has #/x-guidance: .* leave it out"):
            grammar_of(loose, compact=True)
        assert grammar_of(loose, lenient=True, compact=True) == grammar_of(schema, lenient=True, compact=True)


async def test_a_pattern_that_cannot_be_enforced_is_refused() -> None:
    for pattern in ("a(", r"a\b", "(?=a)"):
        with pytest.raises(InvalidRequest) as failed:
            await GrammarChecks().check(regex_grammar(pattern), param="regex")
        assert failed.value.param == "regex"


async def test_a_grammar_with_a_special_token_is_refused_by_name() -> None:
    checking = GrammarChecks()
    try:
        for grammar in ('start: "a" <|end|>', "start: <|im_end|>", "start: <think> /a+/"):
            name = grammar[grammar.index("<") : grammar.index(">") + 1]
            with pytest.raises(
                InvalidRequest, match=re.escape(f"it names the special token {name}: an answer is text")
            ):
                await checking.check(grammar, param="grammar")
        await checking.check('start: "a" "<|end|>"', param="grammar")
    finally:
        checking.close()


async def test_a_grammar_that_names_a_token_by_its_number_is_refused() -> None:
    """Also where only a later part of the answer does, or a grammar within."""
    checking = GrammarChecks()
    try:
        for grammar in (
            "start: <[12]>",
            'start: "<[" x // <[7]>\nx: "a" | "b" <[1-4,12]>',
            "start: /a+/ <[^1-4]>",
            'start: "a" <[*]>',
            "start: %lark {\nstart: <[3]>\n}",
        ):
            name = grammar[grammar.rindex("<") : grammar.rindex(">") + 1]
            with pytest.raises(
                InvalidRequest,
                match=re.escape(f"'grammar' cannot be enforced: it names a token by its number, {name}: an answer is"),
            ):
                await checking.check(grammar, param="grammar")
        listed = '{"grammars":[{"lark_grammar":"start: @b"},{"name":"b","lark_grammar":"start: \\u003c\\u005b3]>"}]}'
        with pytest.raises(InvalidRequest, match="names a token by its number"):
            await checking.check(listed, param="grammar")
        await checking.check('start: "<[12]>" /<[^1]>/ // <[*]>', param="grammar")
        await checking.check(json_grammar({"enum": ["<[12]>", "\\u003c["]}), param="json")
    finally:
        checking.close()


async def test_errors_are_short() -> None:
    with pytest.raises(InvalidRequest) as failed:
        await GrammarChecks().check(regex_grammar("(" * 50_000), param="regex")
    assert len(failed.value.message) < 2000


Processes = list[Any]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """The processes that were started to compile; only one compiles at a time."""
    made: Processes = []
    monkeypatch.setattr(checker, "MAX_AT_ONCE", 1)
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: made.append(Popen(*args, **options)) or made[-1])
    return made


class Held:
    """Holds up whoever compiles one of the grammars until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *grammars: str) -> None:
        self.asked: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        compile_it = LimitedProcess.ask

        def ask(compiler: Any, encoded: bytes, cpu_s: float) -> bytes:
            self.asked.append(encoded.decode())
            self.begun.set()
            assert encoded.decode() not in grammars or self.go_on.wait(60)
            return compile_it(compiler, encoded, cpu_s)

        monkeypatch.setattr(LimitedProcess, "ask", ask)


async def test_a_grammar_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library counts the work of an intersection as one, and does not stop."""
    monkeypatch.setattr(checker, "CPU_S", 0.1)
    rules = [f"A{i}: (A{i + 1} & /.*[{chr(97 + i % 26)}{i % 10}].*/)" for i in range(150)]
    grammar = "\n".join(["start: A0", *rules, "A150: /.*/"])
    checking = GrammarChecks()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.1 s"):
            await checking.check(grammar, param="grammar")


async def test_a_grammar_that_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    held, checking = Held(monkeypatch, 'start: "a"'), GrammarChecks()
    slow = [asyncio.create_task(checking.check('start: "a"', param="grammar")) for _ in range(2)]
    assert await asyncio.to_thread(held.begun.wait, 60)
    for _ in range(2):
        await checking.check('start: "b"', param="grammar")
    assert not any(task.done() for task in slow)
    held.go_on.set()
    await asyncio.gather(*slow)
    assert sorted(held.asked) == ['start: "a"', 'start: "b"'], "each of them once"


async def test_large_grammars_hold_up_no_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [choice_grammar([str(number) * checker.LARGE_CHARS]) for number in range(checker.MAX_AT_ONCE)]
    held, checking = Held(monkeypatch, *large), GrammarChecks()
    slow = [asyncio.create_task(checking.check(grammar, param="grammar")) for grammar in large]
    assert await asyncio.to_thread(held.begun.wait, 60)
    await checking.check('start: "b"', param="grammar")
    assert not any(task.done() for task in slow)
    held.go_on.set()
    await asyncio.gather(*slow)


async def test_an_abandoned_grammar_is_not_compiled(monkeypatch: pytest.MonkeyPatch, processes: Processes) -> None:
    held, checking = Held(monkeypatch, 'start: "a"'), GrammarChecks()
    slow, *gone, shared, waited = (
        asyncio.create_task(checking.check(f'start: "{name}"', param="grammar")) for name in "abcdd"
    )
    assert await asyncio.to_thread(held.begun.wait, 60)
    for task in (*gone, shared):
        task.cancel()
    await asyncio.wait([*gone, shared])
    held.go_on.set()
    await asyncio.gather(slow, waited)
    await checking.check('start: "b"', param="grammar")
    assert held.asked == [f'start: "{name}"' for name in "adb"]
    checking.close()
    processes[0].wait(60)


async def test_a_dead_compilers_work_goes_to_another(processes: Processes) -> None:
    checking = GrammarChecks()
    await checking.check('start: "a"', param="grammar")
    processes[0].kill()
    processes[0].wait()
    await checking.check('start: "b"', param="grammar")
    assert len(processes) == 2
    del checking
    gc.collect()
    processes[1].wait(60)  # it ends with who asks it


@pytest.mark.parametrize(
    ("sent", "error", "told"),
    [
        (signal.SIGKILL, Overloaded, "return code -9"),
        (signal.SIGABRT, InvalidRequest, "too much memory"),
        (signal.SIGSEGV, InvalidRequest, "too deeply"),
    ],
)
async def test_one_that_ends_every_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, sent: signal.Signals, error: type[BatonError], told: str
) -> None:
    checking, ask = GrammarChecks(), LimitedProcess.ask

    def dying(compiler: Any, encoded: bytes, cpu_s: float) -> bytes:
        compiler.process.send_signal(sent)
        compiler.process.wait()
        return ask(compiler, encoded, cpu_s)

    with monkeypatch.context() as patched:
        patched.setattr(LimitedProcess, "ask", dying)
        with pytest.raises(error, match=told):
            await checking.check('start: "a"', param="grammar")
    assert len(processes) == 2
    again = checking.check('start: "a"', param="grammar")
    if error is InvalidRequest:
        with pytest.raises(error, match=told):
            await again
    else:
        await again


async def test_a_process_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, processes: Processes) -> None:
    checking = GrammarChecks()
    await checking.check('start: "a"', param="grammar")
    processes[0].send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(LimitedProcess, "_read", silent)
        with pytest.raises(Overloaded, match="come again"):
            await checking.check('start: "b"', param="grammar")
    assert processes[0].wait(60) == -signal.SIGKILL
    await checking.check('start: "b"', param="grammar")


def silent(compiler: Any) -> bytes:
    assert compiler._ours.gettimeout() == checker.WAIT_S
    raise TimeoutError


async def test_chained_definitions_end_no_process() -> None:
    definitions: dict[str, Any] = {f"x{i}": {"$ref": f"#/$defs/x{i - 1}"} for i in range(1, 2500)}
    definitions["x0"] = {"type": "string"}
    await GrammarChecks().check(json_grammar({"$defs": definitions, "$ref": "#/$defs/x2499"}), param="json")
