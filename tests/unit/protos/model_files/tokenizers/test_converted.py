"""Tokenizers that are published in other files than tokenizer.json. expected.json has the ids that SentencePiece's own
library (0.2.3) gives with the models in this folder."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.folder import FolderFiles

HERE = Path(__file__).parent
EXPECTED: dict[str, list[tuple[str, list[int]]]] = json.loads((HERE / "expected.json").read_text())
TEXTS = ["Hello world, it's 2026!", "  two  spaces\n\nand lines\t", "Größe naïve 日本 🙂", "", "don't'LL 12345"]


def made(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = FolderFiles(folder).text("tokenizer.json")
    assert text is not None
    return tokenizers.Tokenizer.from_str(text)


def put(folder: Path, name: str, content: bytes | str) -> None:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("model", EXPECTED)
def test_ids_equal_those_of_sentencepiece(model: str, tmp_path: Path) -> None:
    put(tmp_path, "tokenizer.model", (HERE / f"{model}.model").read_bytes())
    tokenizer = made(tmp_path, {})
    for text, ids in EXPECTED[model]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.encode(text).ids == [1, *ids]


def test_added_tokens_stand_behind_the_pieces(tmp_path: Path) -> None:
    put(tmp_path, "tokenizer.model", (HERE / "bpe.model").read_bytes())
    added = {"330": {"content": "<|end|>", "special": True}, "331": {"content": "<tool>", "special": False}}
    config: dict[str, Any] = {"added_tokens_decoder": added, "add_bos_token": False, "eos_token": "<|end|>"}
    ids = made(tmp_path, config | {"add_eos_token": True}).encode("a<tool>").ids
    assert ids[-2:] == [331, 330]
    assert ids[0] != 1
    with pytest.raises(BadCheckpoint, match=r"'<\|end\|>' is 340, there is none with number 330"):
        made(tmp_path, {"added_tokens_decoder": {"340": added["330"]}})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "the token id 'x': it must be an integer"),
        ({"added_tokens_decoder": {"330": {"text": "a"}}}, r"\['330'\] is .*: it must be an object with a string"),
        ({"added_tokens_decoder": ["a"]}, r"added_tokens_decoder is \['a'\]: it must be an object"),
        ({"additional_special_tokens": 5}, "additional_special_tokens is 5: it must be a list"),
    ],
)
def test_malformed_added_tokens_are_named(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    put(tmp_path, "tokenizer.model", (HERE / "bpe.model").read_bytes())
    with pytest.raises(BadCheckpoint, match=problem):
        made(tmp_path, config)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_space_goes_before_each_part_only_in_legacy_models(legacy: bool, tmp_path: Path) -> None:
    put(tmp_path, "tokenizer.model", (HERE / "bpe.model").read_bytes())
    tokenizer = made(tmp_path, {"legacy": legacy})
    assert tokenizer.encode("</s>a").tokens == ["<s>", "</s>", "▁a" if legacy else "a"]


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ((HERE / "bpe.model").read_bytes()[:-3], BadCheckpoint, "is no SentencePiece model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17\n", BadCheckpoint, "git lfs pull"),
        (b"\x0a\x05\x0a\x01a\x18\x02\x12\x02\x18\x03", UnsupportedModel, "WORD.*UNIGRAM"),
    ],
    ids=["truncated", "pointer", "words"],
)
def test_a_file_that_cannot_be_read_is_named(
    content: bytes, error: type[Exception], named: str, tmp_path: Path
) -> None:
    put(tmp_path, "tokenizer.model", content)
    with pytest.raises(error, match=named) as caught:
        made(tmp_path, {})
    assert "tokenizer.model" in str(caught.value)


def trained() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges_give_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    trained().model.save(str(tmp_path))
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    put(tmp_path, "added_tokens.json", json.dumps({"<|im_end|>": size}))
    ours = made(tmp_path, {"tokenizer_class": kind, "eos_token": "<|im_end|>"})
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    theirs = getattr(transformers, kind)(**files, eos_token="<|im_end|>", unk_token=None, pad_token=None)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.encode("a<|im_end|>").ids[-1] == size
    with pytest.raises(UnsupportedModel, match=r"tokenizer_class .* is 'FooTokenizer'.*save_pretrained"):
        made(tmp_path, {"tokenizer_class": "FooTokenizer"})


def test_tekken_joins_by_rank(tmp_path: Path) -> None:
    """Against the rule itself: within a piece, the pair whose whole has the lowest rank is joined first."""
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b" t", b"the", b" the", b"in", b"ing", b"\xc3\xb6"]
    entries = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    sizes = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+",
        "default_vocab_size": 269,
        "default_num_special_tokens": 5,
    }
    special = [{"rank": 3, "token_str": "[INST]", "is_control": True}]
    put(tmp_path, "tekken.json", json.dumps({"config": sizes, "vocab": entries, "special_tokens": special}))
    tokenizer = made(tmp_path, {})

    def joined(piece: bytes) -> list[int]:
        parts = [bytes([byte]) for byte in piece]
        while pairs := [(words.index(a + b), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in words]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [5 + words.index(part) for part in parts]

    for text in ("the", "thething", "höhe", "in"):
        assert tokenizer.encode(text).ids == [1, *joined(text.encode())]
    assert tokenizer.encode("[INST] the", add_special_tokens=False).ids == [3, 5 + words.index(b" the")]
    assert len(words) + 5 == 269
    put(tmp_path, "tekken.json", json.dumps({"config": sizes, "vocab": entries[1:]}))
    with pytest.raises(BadCheckpoint, match=r"tekken\.json must have each byte as a token"):
        made(tmp_path, {})


def test_tiktoken_splits_text_as_kimi_does(tmp_path: Path) -> None:
    """Splits are those that are published for Kimi K2: a run of Han letters is a piece of its own."""
    pieces = ["中文", "English", "混合", "北京市", " Pascal", "123", "45", "don't", "!\n"]
    words = [bytes([byte]) for byte in range(256)]
    for piece in [*(piece.encode() for piece in pieces), "文English".encode(), b"12345"]:
        words += [piece[:end] for end in range(2, len(piece) + 1) if piece[:end] not in words]
    lines = [f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words)]
    put(tmp_path, "tiktoken.model", "\n".join(lines[::-1]))
    added = {str(len(words) + 2): {"content": "[EOS]", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "eos_token": "[EOS]"}
    tokenizer = made(tmp_path, config)
    for text, parts in {
        "中文English混合": pieces[:3],
        "北京市 Pascal": pieces[3:5],
        "12345": pieces[5:7],
        "don't!\n": pieces[7:],
    }.items():
        assert tokenizer.encode(text).ids == [words.index(part.encode()) for part in parts], text
    assert tokenizer.encode("中文[EOS]").ids == [words.index("中文".encode()), len(words) + 2]
    assert tokenizer.get_vocab_size() == len(words) + 256
    with pytest.raises(UnsupportedModel, match=r"tiktoken\.model: tokenizer_class .* is 'Other'"):
        made(tmp_path, {"tokenizer_class": "Other"})
    put(tmp_path, "tiktoken.model", "\n".join(lines[1:]))
    with pytest.raises(BadCheckpoint, match=r"tiktoken\.model is no tiktoken file"):
        made(tmp_path, config)
