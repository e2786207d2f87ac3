"""Nothing held out leaks into the demo model's training, and its answers are worth giving."""

from __future__ import annotations

import dataclasses
import random
import types
from pathlib import Path

import pytest

from demo.corpus import (
    MAX_ANSWER_CHARS,
    QUESTIONS,
    Corpus,
    DocstringEntry,
    Document,
    is_held_out,
    load_corpus,
    module_entries,
    shorten,
    source_documents,
)
from demo.held_out import choose
from demo.rows import Mixture, TrainingRows, ask
from demo.vocabulary import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_no_held_out_file_or_name_is_trained_on(corpus: Corpus) -> None:
    trained = {document.name for document in corpus.documents}
    held_out = {document.name for document in corpus.held_out_documents}
    assert trained, "there is something to read"
    assert held_out, "there is something to measure on"
    assert not trained & held_out
    assert not {entry.name for entry in corpus.entries} & {entry.name for entry in corpus.held_out_entries}
    assert not {entry.answer for entry in corpus.entries} & {entry.answer for entry in corpus.held_out_entries}


def test_about_three_percent_of_names_are_held_out() -> None:
    assert 200 < sum(is_held_out(f"name{number}") for number in range(10_000)) < 400


def test_well_known_names_are_asked_for_in_training(corpus: Corpus) -> None:
    famous = {entry.name for entry in corpus.entries if entry.well_known}
    assert {"os.path.join", "len", "print", "json.loads", "str.split", "dict", "math.sqrt", "os.listdir"} <= famous


def test_an_entry_answers_with_the_docstring(corpus: Corpus) -> None:
    (join,) = (entry for entry in corpus.entries if entry.name == "os.path.join")
    assert join.answer.startswith("Join two or more pathname components")


def test_no_answer_is_longer_than_promised(corpus: Corpus) -> None:
    assert max(len(entry.answer) for entry in corpus.entries) <= MAX_ANSWER_CHARS


def test_tests_and_installed_packages_are_not_read(tmp_path: Path) -> None:
    for name in ("good.py", "package/also_good.py", "test/test_good.py", "site-packages/other.py", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else "x = 1\n")
    documents = list(source_documents(tmp_path))
    assert [document.name for document in documents] == ["good.py", "package/also_good.py"]
    assert documents[0].text == "# good.py\nx = 1\n"


def test_a_module_documents_only_its_own_definitions() -> None:
    module = types.ModuleType("mine", "What this module is for.")

    class Box:
        """A box that holds one thing."""

        def open(self) -> None:
            """Take the thing out of the box."""

        def _rust(self) -> None:
            """Nobody needs to know about this."""

    def borrowed() -> None:
        """Somebody else has defined this."""

    def undocumented() -> None:
        pass

    Box.__module__ = undocumented.__module__ = "mine"
    vars(module).update(Box=Box, borrowed=borrowed, undocumented=undocumented)
    entries = list(module_entries("mine", module))
    expected = [("module", "mine"), ("class", "mine.Box"), ("method", "mine.Box.open")]
    assert [(entry.kind, entry.name) for entry in entries] == expected


@pytest.mark.parametrize(
    ("doc", "answer"),
    [
        ("One line.", "One line."),
        ("First.\n\nSecond.", "First.\n\nSecond."),
        ("First.\n\n" + "x" * MAX_ANSWER_CHARS, "First."),
        ("A sentence. " + "word " * 200, "A sentence."),
        ("a line\n" + "word" * 200, "a line"),
        ("word" * 200, ""),
    ],
    ids=["short", "two paragraphs", "second too long", "cut at a sentence", "cut at a line", "nowhere to cut"],
)
def test_a_long_docstring_is_cut_where_it_reads_well(doc: str, answer: str) -> None:
    assert shorten(doc) == answer


def small_corpus() -> Corpus:
    entries = [
        DocstringEntry(
            name=f"module.name{n}", kind="function", answer=f"Return {n} and nothing else.", well_known=n < 5
        )
        for n in range(10)
    ]
    documents = [Document(name=f"file{n}.py", text=f"value_{n} = {n}\n" * 200) for n in range(5)]
    return Corpus(documents=documents, entries=entries, held_out_documents=documents[:1], held_out_entries=entries[:2])


def test_batches_depend_on_the_seed() -> None:
    corpus = small_corpus()
    tokenizer = train_tokenizer(document.text for document in corpus.documents)

    def batches(seed: int) -> list[list[list[int]]]:
        rows = TrainingRows(corpus, tokenizer, Mixture(lengths=((64, 1.0),)), seed=seed)
        return [rows.batch(256).tolist() for _ in range(4)]

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)


@pytest.mark.parametrize("length", [32, 128])
def test_a_batch_holds_as_many_rows_as_the_tokens_allow(length: int) -> None:
    corpus = small_corpus()
    tokenizer = train_tokenizer(document.text for document in corpus.documents)
    rows = TrainingRows(corpus, tokenizer, Mixture(lengths=((length, 1.0),)), seed=1)
    assert rows.batch(256).shape == (256 // length, length + 1)


def test_a_chat_row_begins_where_a_dialogue_begins() -> None:
    corpus = small_corpus()
    tokenizer = train_tokenizer(document.text for document in corpus.documents)
    rows = TrainingRows(corpus, tokenizer, dataclasses.replace(Mixture(), chat=1.0, lengths=((64, 1.0),)), seed=3)
    text = tokenizer.decode(rows.batch(256)[0].tolist(), skip_special_tokens=False)
    assert text.startswith(("<|bos|><|user|>", "<|bos|><|system|>"))


@pytest.mark.parametrize("kind", sorted(QUESTIONS))
def test_every_question_names_its_subject(kind: str) -> None:
    entry = DocstringEntry(name="module.thing", kind=kind, answer="It is a thing.", well_known=False)
    rng = random.Random(0)
    assert all("module.thing" in ask(entry, rng) for _ in range(20))


def test_the_held_out_sample_is_fixed_by_its_seed() -> None:
    assert choose(small_corpus(), seed=1) == choose(small_corpus(), seed=1)


def test_special_tokens_come_first_in_the_vocabulary() -> None:
    tokenizer = train_tokenizer(["some text"])
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
