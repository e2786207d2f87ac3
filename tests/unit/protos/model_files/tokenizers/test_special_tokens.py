"""Tokens that stand outside of tokenizer.json: they have the ids of transformers, and the eos token ends answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from protos.errors import BadCheckpoint
from protos.model_files.folder import FolderFiles
from protos.model_files.opening import open_model
from router.text.model_card import ModelCard
from tests.unit.router.scripted import byte_level
from workers.models.model_config import read_config

MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 410, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
NUM_STORED = 332
"""Tokens in tokenizer.json."""


def put(folder: Path, **files: Any) -> Path:
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    assert backend.get_vocab_size() == NUM_STORED
    backend.save(str(folder / "tokenizer.json"))
    for name, content in ({"config": MODEL} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": MODEL | {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "<|end|>"}}, {0, 1}),
        ({"config": MODEL | {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2, 3]}}, {0, 2, 3}),
        ({"special_tokens_map": {"eos_token": {"content": "<|end|>"}}}, {1}),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "added_tokens": {"<|im_end|>": NUM_STORED}}, {NUM_STORED}),
        ({"config": MODEL | {"eos_token_id": [1, 410]}}, {1}),
        ({"tokenizer_config": {"eos_token": None}}, set()),
    ],
)
def test_an_answer_ends_with_the_eos_tokens_of_all_files(files: Any, expected: set[int], tmp_path: Path) -> None:
    folder = put(tmp_path, **files)
    assert set(read_config(folder).eos_token_ids) == expected
    assert ModelCard.load(open_model(folder), "m").eos_token_ids == expected


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": {"<|b|>": NUM_STORED + 1, "<|a|>": NUM_STORED}},
        {"tokenizer_config": {"added_tokens_decoder": {str(NUM_STORED): {"content": "<|a|>", "special": True}}}},
        {"tokenizer_config": {"added_tokens_decoder": {str(NUM_STORED): {"content": "<|a|>", "lstrip": True}}}},
        {"tokenizer_config": {"additional_special_tokens": ["<|b|>", "<|a|>"]}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|a|>"}, "pad_token": "<|b|>"}},
        {"special_tokens_map": {"additional_special_tokens": ["<|a|>"], "unk_token": "the"}},
        {"tokenizer_config": {"eos_token": "<|end|>", "pad_token": "<|end|>"}},
    ],
)
def test_tokens_of_other_files_have_the_ids_of_transformers(files: Any, tmp_path: Path) -> None:
    folder = put(tmp_path, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = FolderFiles(folder).text("tokenizer.json")
    assert text is not None
    ours = tokenizers.Tokenizer.from_str(text)
    for sample in ("<|user|>the <|a|> b<|b|><|a|>", " the<|b|>\n", "<|end|>"):
        assert ours.encode(sample, add_special_tokens=False).ids == theirs.encode(sample, add_special_tokens=False)
    for content, token in theirs._tokenizer.get_added_tokens_decoder().items():
        assert ours.get_added_tokens_decoder()[content].special == token.special


def test_a_token_without_an_embedding_is_left_out(tmp_path: Path) -> None:
    folder = put(tmp_path, config=MODEL | {"vocab_size": NUM_STORED}, tokenizer_config={"pad_token": "[PAD]"})
    text = FolderFiles(folder).text("tokenizer.json")
    assert text is not None
    assert max(tokenizers.Tokenizer.from_str(text).encode("a[PAD]").ids) < NUM_STORED


def test_a_gap_before_an_added_token_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, added_tokens={"<|a|>": NUM_STORED + 1})
    with pytest.raises(BadCheckpoint, match=r"<\|a\|>"):
        FolderFiles(folder).text("tokenizer.json")
