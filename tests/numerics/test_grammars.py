"""Answers under a grammar: the model's own choice among what the grammar allows, whoever makes which token of them."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits

from protos.errors import InvalidRequest
from protos.model_files.folder import FolderFiles
from protos.values import FinishReason, GenerateRequest, SamplingParams
from router.text.grammar.structure import choice_grammar, json_grammar, regex_grammar
from router.text.tokenizer import Tokenizer
from router.text.tools.calls import CallDelta, Function
from router.text.tools.formats import ToolFormat, reader_of
from router.text.tools.grammar import calls_grammar
from tests.numerics.conftest import Checkpoint
from tests.numerics.constrained import EOS, PERSON, PROMPTS, VOCAB_SIZE, masked_oracle, under, write_tokenizer
from tests.numerics.engines import Answer, answer, colocated, oracle_answers
from workers.batch import Sample
from workers.engine.engine import Engine
from workers.grammar import guidance
from workers.grammar.guidance import GuidanceGrammars
from workers.worker_config import WorkerConfig


@pytest.fixture(scope="session")
def served(checkpoint: Checkpoint) -> tuple[Path, Any]:
    folder, oracle = checkpoint("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    write_tokenizer(folder)
    return folder, oracle


def config_of(folder: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(model=str(folder), device="cpu", num_blocks=128, prefill_chunk=16, **settings)


def text_of(folder: Path, token_ids: Sequence[int]) -> str:
    return Tokenizer.load(FolderFiles(folder)).decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("settings", [{}, {"steps_in_flight": 1}, {"tp": 2}], ids=str)
def test_greedy_answers_are_the_masked_oracles(served: tuple[Path, Any], settings: dict[str, Any]) -> None:
    """Also beside free rows, whose tokens do not change."""
    folder, oracle = served
    grammars = [json_grammar(PERSON), regex_grammar("(yes|no), [a-f]{2,30}!"), ""]
    expected = [masked_oracle(folder, oracle, PROMPTS[i], grammars[i], 80) for i in (0, 1)]
    [free] = oracle_answers(oracle, PROMPTS[2:], 40)
    asked = [under(grammars[0]), under(grammars[1]), under("", 40, ignore_eos=True)]
    with colocated(config_of(folder, **settings)) as engine:
        answers = answer(engine, PROMPTS, asked)
    assert [output.token_ids for output in answers] == [*expected, free]
    assert [output.finish_reason for output in answers] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    jsonschema.validate(json.loads(text_of(folder, answers[0].token_ids)), PERSON)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum", "number"] + ["object", "array", "anyOf"] * (depth > 0)
    match rng.choice(kinds) if depth < 2 else "object":
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 8)}
        case "integer":
            low = rng.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1}
        case "enum":
            return {"enum": [rng.choice([None, True, 7, "é", 'a"b', [1], {"k": 0}]) for _ in range(3)]}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "object":
            names = ["a", "name with space", 'q"uote', "ünï"][: rng.randint(1, 4)]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


def test_every_answer_that_ends_fits_its_schema(served: tuple[Path, Any]) -> None:
    """Sampled hot, with filters, penalties and a bias that would rather say something else."""
    folder, _ = served
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(24)]
    changes: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": ((200, 100.0),)},
    ]
    asked = [
        under(json_grammar(schema), 300, temperature=1.5, seed=i, min_tokens=i % 9, **changes[i % len(changes)])
        for i, schema in enumerate(schemas)
    ]
    with colocated(config_of(folder)) as engine:
        answers = answer(engine, [[i + 3] for i in range(len(schemas))], asked)
    ended = [(output, schema) for output, schema in zip(answers, schemas, strict=True) if output.token_ids[-1] == EOS]
    assert len(ended) > len(schemas) // 2
    for ended_output, schema in ended:
        assert ended_output.finish_reason is FinishReason.STOP
        assert ended_output.token_ids.count(EOS) == 1
        jsonschema.validate(json.loads(text_of(folder, ended_output.token_ids)), schema)


@pytest.mark.parametrize("form", [ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL])
def test_required_calls_are_read_as_calls(served: tuple[Path, Any], form: ToolFormat) -> None:
    folder, _ = served
    functions = [Function(name="save", parameters=PERSON, strict=True), Function(name="now")]
    asked = [
        under(calls_grammar(form, functions, parallel=parallel), 300, temperature=1.0, seed=seed)
        for seed in range(2)
        for parallel in (False, True)
    ]
    with colocated(config_of(folder)) as engine:
        answers = answer(engine, [[5]] * len(asked), asked)
    schemas = {"save": PERSON, "now": {"type": "object", "maxProperties": 0}}
    for finished in (output for output in answers if output.finish_reason is FinishReason.STOP):
        reader = reader_of(form, functions)
        parts = [*reader.feed(text_of(folder, finished.token_ids)), *reader.end()]
        assert not [part for part in parts if isinstance(part, str)]
        calls = [part for part in parts if isinstance(part, CallDelta)]
        for begun in (part for part in calls if part.name):
            told = "".join(part.arguments for part in calls if part.index == begun.index)
            jsonschema.validate(json.loads(told), schemas[begun.name])
    assert sum(output.finish_reason is FinishReason.STOP for output in answers) >= 2


def test_another_worker_goes_on_with_the_same_tokens(served: tuple[Path, Any]) -> None:
    folder, _ = served
    asked = under(json_grammar(PERSON), temperature=1.0, seed=5)
    with colocated(config_of(folder)) as first, colocated(config_of(folder)) as second:
        [whole] = answer(first, PROMPTS[:1], asked)
        for cut in (1, 7, len(whole.token_ids) - 1):
            assert goes_on(second, PROMPTS[0], asked, whole.token_ids[:cut]) == whole.token_ids[cut:]


def goes_on(engine: Engine, prompt: Sequence[int], asked: SamplingParams, output: Sequence[int]) -> list[int]:
    taken = Answer()
    engine.submit(
        GenerateRequest(
            request_id=f"after {len(output)}", prompt_ids=tuple(prompt), output_ids=tuple(output), sampling=asked
        ),
        now=0.0,
    )
    while engine.has_work():
        for update in engine.step(now=0.0):
            assert update.error is None
            taken.token_ids += update.token_ids
    return taken.token_ids


def test_a_grammar_that_fails_ends_its_request_alone(served: tuple[Path, Any]) -> None:
    """A grammar that cannot be compiled, and one that earlier tokens have broken."""
    folder, _ = served
    good, broken = under(json_grammar(PERSON)), under(regex_grammar("[0-9]{8}"))
    with colocated(config_of(folder)) as engine:
        for name, sampling, output in (("a", good, ()), ("b", broken, (200, 200)), ("c", under("start: ("), ())):
            engine.submit(
                GenerateRequest(request_id=name, prompt_ids=(5, 6), output_ids=output, sampling=sampling), now=0.0
            )
        ends = {}
        while engine.has_work():
            for update in engine.step(now=0.0):
                if update.finish_reason is not None:
                    ends[update.request_id] = (update.finish_reason, update.error.message if update.error else "")
            engine.check_integrity()
        engine.assert_idle()
    assert ends["a"] == (FinishReason.STOP, "")
    assert ends["b"][0] is ends["c"][0] is FinishReason.ERROR
    assert "cannot follow its grammar" in ends["b"][1]
    assert "cannot be compiled" in ends["c"][1]


def test_a_mask_that_takes_long_holds_up_its_own_request_alone(
    served: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = served
    go_on, make = threading.Event(), GuidanceGrammars._mask

    def slowly(self: GuidanceGrammars, standing: Any) -> Any:
        assert len(standing.output_ids) < 3 or go_on.wait(60)
        return make(self, standing)

    grammar = json_grammar(PERSON)
    asked = {"a": under(grammar), "b": under("", 40, ignore_eos=True)}
    told: dict[str, list[int]] = {"a": [], "b": []}
    monkeypatch.setattr(GuidanceGrammars, "_mask", slowly)
    with colocated(config_of(folder)) as engine:
        for name, prompt in zip(asked, PROMPTS, strict=False):
            engine.submit(GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=asked[name]), now=0.0)
        while engine.has_work():
            for update in engine.step(now=0.0):
                told[update.request_id] += update.token_ids
            engine.check_integrity()
            if len(told["b"]) == 40 and len(told["a"]) == 3:
                go_on.set()
        engine.assert_idle()
    assert told["b"] == oracle_answers(oracle, PROMPTS[1:2], 40)[0]
    assert told["a"] == masked_oracle(folder, oracle, PROMPTS[0], grammar, 80)


def test_a_grammar_that_unfolds_too_far_is_told_the_limit(served: tuple[Path, Any]) -> None:
    folder, _ = served
    asked = under("start: s\ns: " + " | ".join("s " * num for num in range(2, 32)) + "| /[ -~]/")
    [letter] = Tokenizer.load(FolderFiles(folder))._encode(["e"], False)[0]
    request = GenerateRequest(request_id="a", prompt_ids=(5,), output_ids=(letter,) * 40, sampling=asked)
    with colocated(config_of(folder)) as engine:
        engine.submit(request, now=0.0)
        updates = []
        while engine.has_work():
            updates += engine.step(now=0.0)
        engine.assert_idle()
    [end] = updates
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert "more than 2,000 rules are possible at one place (max_items_in_row)" in end.error.message


def test_a_slow_mask_ends_only_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such requests take all threads; the next ones have others. A request with the same grammar ends at once."""
    write_tokenizer(tmp_path)
    go_on, begun, ready, make = threading.Event(), threading.Semaphore(0), threading.Event(), GuidanceGrammars._mask

    def hanging(self: GuidanceGrammars, standing: Any) -> Any:
        if standing.grammar == endless:
            begun.release()
            assert go_on.wait(60)
        return make(self, standing)

    endless, short = regex_grammar("a+"), regex_grammar("b+")
    monkeypatch.setattr(GuidanceGrammars, "_mask", hanging)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    grammars.listener = ready.set
    for name in "abc":
        grammars.begin(name, endless, ())
    for _ in "ab":
        assert begun.acquire(timeout=60)
    grammars.end_overdue(max_s=0.0)
    for name in "ab":
        assert name not in grammars.pending()
        with pytest.raises(InvalidRequest, match=r"more than 2 s of CPU time \(MAX_MASK_S\): make it less ambiguous"):
            grammars.allowed(name, Sample(params=under(endless), index=0, output_ids=()))
    while grammars.allowed("d", Sample(params=under(short), index=0, output_ids=())) is None:
        ready.wait(30)
        ready.clear()
    while "c" in grammars.pending():
        ready.wait(30)
        ready.clear()
    go_on.set()
    with pytest.raises(InvalidRequest, match="MAX_MASK_S"):
        grammars.allowed("c", Sample(params=under(endless), index=0, output_ids=()))


def test_large_grammars_hold_up_no_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    go_on, make = threading.Event(), GuidanceGrammars._matcher

    def slowly(self: GuidanceGrammars, grammar: str) -> Any:
        assert len(grammar) <= guidance.LARGE_CHARS or go_on.wait(60)
        return make(self, grammar)

    monkeypatch.setattr(GuidanceGrammars, "_matcher", slowly)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    large = [f"large-{number}" for number in range(5)]
    for name in large:
        grammars.begin(name, choice_grammar([name * guidance.LARGE_CHARS]), ())
    assert len(mask_of(grammars, choice_grammar(["a"]))) == 1
    assert set(large) <= set(grammars.pending())
    go_on.set()


def test_masks_of_drafts_wait_for_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setattr(guidance, "PATIENCE_S", 60.0)
    grammar, make = regex_grammar("abcde"), GuidanceGrammars._mask_of
    begun, go_on = threading.Event(), threading.Event()
    reference, grammars = (
        GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,)) for _ in range(2)
    )
    written: tuple[int, ...] = ()
    for _ in range(4):
        written += (mask_of(reference, grammar, written)[0],)

    def slowly(self: GuidanceGrammars, matcher: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return make(self, matcher)

    assert written[0] in mask_of(grammars, grammar)
    monkeypatch.setattr(GuidanceGrammars, "_mask_of", slowly)
    standing = grammars._standing["r"]
    grammars.draft("r", written[:1])
    first = standing.further
    grammars.draft("r", written[:3])
    second = standing.further
    assert first is not None
    assert second is not None
    assert begun.wait(60), (first, second, standing)
    assert not second.done()
    go_on.set()
    second.result(timeout=60)
    samples = [Sample(params=under(grammar), index=num, output_ids=written[:num]) for num in range(4)]
    masks = grammars.allowed_after("r", samples)
    assert [int(mask.view(np.uint8).tobytes()[token_id // 8]) >> token_id % 8 & 1 for mask, token_id in
            zip(masks, written[1:], strict=True)] == [1, 1, 1]  # fmt: skip
    assert mask_of(grammars, grammar, written) == mask_of(reference, grammar, written)


def test_masks_are_not_made_on_the_engines_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    masks = list[tuple[set[int], int]]()

    class Looking(GuidanceGrammars):
        def _mask(self, standing: Any) -> Any:
            masks.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            return super()._mask(standing)

    monkeypatch.setattr(guidance, "PATIENCE_S", 60.0)  # however busy the machine, no mask is slow
    everywhere, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def engine() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        grammars = Looking(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
        [first] = mask_of(grammars, choice_grammar(["ab"]))
        mask_of(grammars, choice_grammar(["ab"]), (first,))

    bound = threading.Thread(target=engine)
    bound.start()
    bound.join()
    assert masks == [(everywhere, min(19, nice + guidance.NICE)), (everywhere, nice)]


@pytest.mark.parametrize("grammar", [choice_grammar(["</s>!"]), regex_grammar("</s>!"), 'start: "</s>" "!"'])
def test_the_text_of_an_end_token_is_text(tmp_path: Path, grammar: str) -> None:
    write_tokenizer(tmp_path)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    written: tuple[int, ...] = ()
    while (mask := mask_of(grammars, grammar, written)) != [EOS]:
        assert EOS not in mask
        written += (mask[0],)
    assert text_of(tmp_path, written) == "</s>!"


def test_no_text_is_a_special_token_and_names_change_no_mask(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ours, others = (GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,)) for _ in range(2))
    assert 1 not in mask_of(ours, choice_grammar(["\ufdd01\ufdd1"]))
    for grammar in (regex_grammar("(.|\n)*"), regex_grammar("[^a]{0,9}!"), json_grammar(PERSON)):
        assert mask_of(ours, grammar) == mask_of(others, grammar)


def test_an_answer_ends_only_where_its_grammar_is_fulfilled(tmp_path: Path) -> None:
    """A grammar can name tokens by their numbers."""
    write_tokenizer(tmp_path)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS, 1, 0))
    with pytest.raises(InvalidRequest, match=r"names a token that ends an answer \(2, 1, 0\)"):
        mask_of(grammars, "start: <[2]>")
    [letter] = Tokenizer.load(FolderFiles(tmp_path))._encode(["a"], False)[0]
    assert mask_of(grammars, 'start: "a" | <[0-2]> "b"') == [letter]


def test_a_pattern_with_too_many_states_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=20))
    write_tokenizer(tmp_path)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    [letter] = Tokenizer.load(FolderFiles(tmp_path))._encode(["a"], False)[0]
    with pytest.raises(InvalidRequest, match="max_lexer_states"):
        mask_of(grammars, regex_grammar(r"\p{L}{0,2000}"), (letter,) * 20)


def test_a_tokenizer_with_special_tokens_in_merges_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["merges"] = [["<", "/"], ["</", "s>"]]
    words = state["model"]["vocab"]
    words |= {"</": len(words), "s>": len(words) + 1}
    path.write_text(json.dumps(state))
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    assert mask_of(grammars, choice_grammar(["</s>"])) == [words["</"]]


def mask_of(grammars: GuidanceGrammars, grammar: str, output_ids: tuple[int, ...] = ()) -> list[int]:
    ready = threading.Event()
    grammars.listener = ready.set
    sample = Sample(params=under(grammar), index=len(output_ids), output_ids=output_ids)
    while (mask := grammars.allowed("r", sample)) is None:
        ready.wait(30)
        ready.clear()
    return [int(token_id) for token_id in np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]]


def test_ends_are_allowed_only_where_the_grammar_may_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS, 1))
    ready = threading.Event()
    grammars.listener = ready.set
    params = under(regex_grammar("ab?"))
    a, b = (Tokenizer.load(FolderFiles(tmp_path))._encode([text], False)[0][0] for text in "ab")

    def allowed(*output_ids: int, **changes: Any) -> list[int]:
        sample = Sample(params=params, index=len(output_ids), output_ids=output_ids, **changes)
        while (mask := grammars.allowed("r", sample)) is None:
            ready.wait(30)
            ready.clear()
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return [int(token_id) for token_id in bits.nonzero()[0]]

    assert allowed() == [a]
    assert allowed(a) == sorted([1, EOS, b])
    assert allowed(a, banned_ids=(1, EOS)) == [b]
    assert allowed(a, b) == allowed(a, b, banned_ids=(1, EOS)) == [1, EOS]
    assert allowed(a) == sorted([1, EOS, b]), "also of a request that has gone back"


def test_what_nobody_waits_for_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    begun: list[str] = []
    go_on, ready, started = threading.Event(), threading.Event(), threading.Semaphore(0)
    compile_it = GuidanceGrammars._matcher

    def held(self: GuidanceGrammars, grammar: str) -> Any:
        begun.append(grammar)
        started.release()
        assert go_on.wait(60)
        return compile_it(self, grammar)

    monkeypatch.setattr(GuidanceGrammars, "_matcher", held)
    grammars = GuidanceGrammars(FolderFiles(tmp_path), vocab_size=VOCAB_SIZE, eos_ids=(EOS,))
    grammars.listener = ready.set
    busy, gone, shared = [regex_grammar("a"), regex_grammar("b")], regex_grammar("c+"), regex_grammar("d+")
    for name, grammar in zip("abcde", [*busy, gone, gone, shared], strict=True):
        grammars.begin(name, grammar, ())
    grammars.begin("f", shared, ())
    assert all(started.acquire(timeout=60) for _ in busy)
    grammars.release("abcde")
    go_on.set()

    def wait_for(name: str, grammar: str) -> None:
        while grammars.allowed(name, Sample(params=under(grammar), index=0, output_ids=())) is None:
            ready.wait(30)
            ready.clear()

    wait_for("f", shared)
    assert sorted(begun) == sorted([*busy, shared])
    wait_for("g", gone)
    assert begun[-1] == gone


def test_dropped_masks_are_computed_again(served: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = served
    asked = [under(json_grammar(PERSON)), under(regex_grammar("[0-9]{20}")), under(regex_grammar("[a-z]{20}"))]
    with colocated(config_of(folder)) as engine:
        expected = [output.token_ids for output in answer(engine, PROMPTS, asked)]
        monkeypatch.setattr(guidance, "MAX_COMPILED", 1)
        assert [output.token_ids for output in answer(engine, PROMPTS, asked)] == expected


def test_a_worker_without_a_tokenizer_refuses(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint("qwen2")
    with colocated(config_of(folder)) as engine, pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        answer(engine, [[5]], under("start: /a/"))
