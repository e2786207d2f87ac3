"""A remembered stretch of a prompt has the ids that the whole prompt has there, and only its own tenant finds it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from router.text import stretches
from router.text.stretches import Stretches
from router.text.tokenizer import Tokenizer
from tests.unit.router.text.test_control import SHAPES, shape

WORDS = (
    "path", "join", " ", "  ", "\n", "\n\n", "    ", "naïve", "e\u0301", "\u0301", "123", "'s", "你好", "🙂", "<h1>",
    "<|im_end|>", "</s>",
    "[INST]", "<think>", "</think>", "<tool_call>", "<|", "|>", "<|eot_id|>", "def f(x):", "▁", "\t", "<|end|>",
)  # fmt: skip


def said(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 60)))


def turns(draw: random.Random, name: str) -> list[list[dict[str, Any]]]:
    """The prompts of a conversation that grows, is edited, and continues from an earlier turn."""
    messages: list[dict[str, Any]] = []
    prompts = []
    for _ in range(8):
        messages = [*messages, {"role": "user", "content": said(draw)}]
        prompts.append(messages)
        messages = [*messages, {"role": "assistant", "content": said(draw)}]
        if draw.random() < 0.3:
            messages = messages[: 2 * draw.randrange(1, len(messages) // 2 + 1)]
        if draw.random() < 0.3:
            edited = draw.randrange(len(messages))
            messages = [*messages]
            messages[edited] = {**messages[edited], "content": said(draw)}
    if name == "parted":
        for each in prompts:
            each[:] = [{**message, "name": "a", "content": [{"text": message["content"]}]} for message in each]
    return prompts


@pytest.fixture(autouse=True)
def _remembers_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.tokenizer.LONG_TEXT_CHARS", -1)


@pytest.mark.parametrize("name", SHAPES)
async def test_remembered_stretches_change_no_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "CHECK_EVERY", 7)
    texts, template = shape(name)
    draw = random.Random(name)
    for _ in range(12):
        for messages in turns(draw, name):
            rendered = template.rendered(messages)
            assert await texts.encode_rendered(rendered, salt=b"a") == await texts.encode_rendered(rendered)
    memories = [texts.stretches, *(plain.stretches for plain in texts.plain.values())]
    assert not any(memory.has_differed for memory in memories)
    assert sum(memory.num_remembered for memory in memories) > sum(memory.num_read for memory in memories)


async def test_of_a_next_turn_only_the_new_text_is_read() -> None:
    texts, template = shape("demo")
    first = [{"role": "user", "content": "What does os.path.join do? " * 100}]
    second = [*first, {"role": "assistant", "content": "It joins."}, {"role": "user", "content": "And split?"}]
    await texts.encode_rendered(template.rendered(first), salt=b"next turn")
    before = texts.stretches.num_read
    ids = await texts.encode_rendered(template.rendered(second), salt=b"next turn")
    assert 0 < texts.stretches.num_read - before < 40 < len(ids) // 10


async def test_no_tenant_finds_anothers_text() -> None:
    texts, template = shape("demo")
    rendered = template.rendered([{"role": "user", "content": "What does os.path.split do? " * 100}])
    ids = await texts.encode_rendered(rendered, salt=b"one tenant")
    before = texts.stretches.num_remembered
    assert await texts.encode_rendered(rendered, salt=b"another") == ids
    assert texts.stretches.num_remembered == before


async def test_memory_is_bounded() -> None:
    texts, template = shape("demo")
    small, parts = Stretches(texts.backend, texts.read_parts, max_bytes=4_000), list[int]()
    for number in range(50):
        rendered = template.rendered([{"role": "user", "content": f"{number} " * 20}])
        assert small.read(rendered.text, None, b"") == await texts.encode_rendered(rendered)
        parts.append(small.num_bytes)
    assert 0 < max(parts) <= 4_000


@pytest.mark.parametrize(
    ("flag", "remembers"),
    [("", True), ("rstrip", True), ("lstrip", False), ("single_word", False), ("normalized", False)],
)
def test_a_token_begins_a_stretch_unless_it_asks_what_is_before_it(flag: str, remembers: bool) -> None:
    flags = {name: name == flag for name in ("single_word", "lstrip", "rstrip")}
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(["a path  to join"], trainers.BpeTrainer(show_progress=False))
    backend.add_tokens([AddedToken("<a>", special=True, normalized=flag == "normalized", **flags)])
    backend.add_tokens([AddedToken("  ", normalized=False), AddedToken("to", normalized=False, lstrip=True)])
    texts, draw = Tokenizer(backend), random.Random(flag)
    for _ in range(200):
        text = "".join(draw.choice(("<a>", " ", "  ", "\n", "to", "path", "join")) for _ in range(30))
        assert list(texts.stretches.read(text, None, b"")) == backend.encode(text).ids
    assert (texts.stretches.num_remembered > 0) is remembers


def test_a_tokenizer_that_gives_up_over_the_trial_reads_prompts() -> None:
    """Its tokens take the same white space, where the library panics."""
    texts, _ = shape("demo")
    backend = tokenizers.Tokenizer.from_str(texts.backend.to_str())
    backend.add_tokens([AddedToken("<a>", normalized=False, rstrip=True)])
    backend.add_tokens([AddedToken("\n", normalized=False, lstrip=True)])
    whole = backend.encode("say <a> it", add_special_tokens=False)
    assert list(Tokenizer(backend).stretches.read("say <a> it", None, b"")) == whole.ids


def test_a_tokenizer_that_cannot_be_cut_reads_the_whole() -> None:
    """Uses a reader that counts preceding text, since no tokenizer of the library does."""

    def counting(parts: Any) -> list[list[int]]:
        return [list(range(len(text))) for text, _ in parts]

    texts, template = shape("demo")
    memory = Stretches(texts.backend, counting)
    text = template.rendered([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]).text
    assert memory.read(text, None, b"") == memory.read(text, None, b"") == tuple(range(len(text)))


def test_a_difference_in_service_ends_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "CHECK_EVERY", 2)
    texts, template = shape("demo")
    forgetful = False

    def reading(parts: Any) -> list[tuple[int, ...]]:
        return [tuple(ids[:-1]) if forgetful and len(parts) > 1 else ids for ids in texts.read_parts(parts)]

    memory = Stretches(texts.backend, reading)
    first, second = (
        template.rendered([{"role": "user", "content": said + end} for end in "abc"]).text for said in ("one", "two")
    )
    assert memory.read(first, None, b"") == texts.read_parts([(first, ())])[0]
    forgetful = True
    assert memory.read(second, None, b"") == texts.read_parts([(second, ())])[0]
    assert memory.has_differed
