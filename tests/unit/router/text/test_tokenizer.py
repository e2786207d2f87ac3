"""Text to token ids: what is added, what is refused, and that long texts are read beside the event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from protos.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from protos.model_files.folder import FolderFiles
from router.text.tokenizer import LONG_TEXT_CHARS, LONG_TEXT_TOKENS, Tokenizer
from tests.unit.router.scripted import Family, byte_level, ids_of, sentencepiece


@pytest.mark.parametrize("family", [byte_level, sentencepiece])
async def test_a_completion_gets_the_start_token_once(family: Family) -> None:
    tokenizer = family()
    bos = tokenizer.named_tokens["bos_token"]
    [completed] = await tokenizer.encode(["hello"], add_special_tokens=True)
    [rendered] = await tokenizer.encode([f"{bos}hello"], add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in completed].count(bos) == 1
    assert [tokenizer.token_text(token_id) for token_id in rendered].count(bos) == 1


async def test_a_long_text_has_the_same_ids() -> None:
    tokenizer, sentence = byte_level(), "the quick brown fox. "
    many = LONG_TEXT_CHARS // len(sentence) + 1
    [long] = await tokenizer.encode([sentence * many], add_special_tokens=True)
    assert tokenizer.decode(long, skip_special_tokens=True) == sentence * many


async def test_many_tokens_are_read_back_beside_the_event_loop() -> None:
    tokenizer = byte_level()
    turns: list[str] = []
    ids = ids_of("naïve 🙂 ") * LONG_TEXT_TOKENS
    asyncio.get_running_loop().call_soon(turns.append, "another client's")
    assert await tokenizer.text_of(ids) == tokenizer.decode(ids)
    assert turns, "the event loop had no turn"


async def test_a_truncating_tokenizer_is_told_not_to() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    [ids] = await Tokenizer(backend).encode(["hello world, how are you today?"], add_special_tokens=False)
    assert ids == tuple(ids_of("hello world, how are you today?"))


@pytest.mark.parametrize("family", [byte_level, lambda: byte_level(nfc=True), sentencepiece])
@given(text=st.text())
def test_the_cheap_bound_never_exceeds_the_count(family: Family, text: str) -> None:
    tokenizer = family()
    assert tokenizer.min_tokens(text) <= len(ids_of(text, tokenizer))


def test_the_cheap_bound_refuses_a_long_text() -> None:
    assert byte_level().min_tokens("x" * 100_000) > 1_000


def test_a_tokenizer_that_drops_text_has_no_bound() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    assert Tokenizer(backend).min_tokens(" " * 10_000) == 0


def test_a_decoder_that_cannot_stream_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no tokenizer\.json"):
        Tokenizer.load(FolderFiles(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="is not a tokenizer"):
        Tokenizer.load(FolderFiles(tmp_path))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tokenizer.model", r"tokenizer\.model has 0 pieces .*download it again"),
        ("vocab.json", r"has no tokenizer\.json, and neither .* vocab\.json with merges\.txt: download the tokenizer"),
        ("tekken.json", r"tekken\.json is not valid JSON"),
        ("other", r"has no tokenizer\.json, and neither"),
    ],
)
def test_a_tokenizer_of_another_kind_comes_with_the_way_on(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(BadCheckpoint, match=told):
        Tokenizer.load(FolderFiles(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_of_git_lfs_is_no_damage(name: str, tmp_path: Path) -> None:
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17\n")
    with pytest.raises(BadCheckpoint, match=rf"{name} is a Git LFS pointer.*run `git lfs pull` in"):
        Tokenizer.load(FolderFiles(tmp_path))


def test_named_tokens_are_read_in_both_spellings(tmp_path: Path) -> None:
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|bos|>", "special": True}, "eos_token": "<|end|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(FolderFiles(tmp_path)).named_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="not valid JSON"):
        Tokenizer.load(FolderFiles(tmp_path))


def _bytes() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(byte_level().backend.to_str())


async def test_a_text_over_which_the_tokenizer_gives_up_is_refused() -> None:
    """The library panics, which is no Exception."""
    backend = _bytes()
    split = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    with pytest.raises(InvalidRequest):
        await Tokenizer(backend).encode(["a" * 40 + "b"], add_special_tokens=False)


@pytest.mark.parametrize(
    "step",
    [
        normalizers.Replace("a", "a" * 20),
        normalizers.Replace(tokenizers.Regex("x*"), "a" * 20),
        normalizers.Prepend("a" * 20),
    ],
)
def test_a_tokenizer_that_makes_texts_much_longer_is_refused(step: normalizers.Normalizer) -> None:
    backend = _bytes()
    backend.normalizer = normalizers.Sequence([step] * 3)
    with pytest.raises(BadCheckpoint):
        Tokenizer(backend)
