"""tokenizer.json of a folder that has none, from the files that its tokenizer is published in."""

from __future__ import annotations

from pathlib import Path

from protos.errors import BadCheckpoint
from protos.hints import lfs_pointer
from protos.model_files.plain_files import read_plain, read_text
from protos.model_files.tokenizers.byte_level import tekken_tokenizer, tiktoken_tokenizer, vocab_tokenizer
from protos.model_files.tokenizers.sentencepiece import sentencepiece_tokenizer
from protos.model_files.tokenizers.special_tokens import Read

OTHERS = (("tokenizer.model",), ("tekken.json",), ("tiktoken.model",), ("vocab.json", "merges.txt"))


def has_other_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in OTHERS)


def other_tokenizer(folder: Path, read: Read) -> str | None:
    """Returns None if the folder has none of `OTHERS`. Raises BadCheckpoint or UnsupportedModel."""
    if not has_other_tokenizer(folder):
        return None
    config, added = read("tokenizer_config.json") or {}, read("added_tokens.json") or {}
    model = folder / "tokenizer.model"
    if model.is_file():
        if pointer := lfs_pointer(model):
            raise BadCheckpoint(pointer)
        return sentencepiece_tokenizer(read_plain(model), config, added, str(model))
    tekken = read("tekken.json")
    if tekken is not None:
        return tekken_tokenizer(tekken, str(folder / "tekken.json"))
    ranks = folder / "tiktoken.model"
    if ranks.is_file():
        if pointer := lfs_pointer(ranks):
            raise BadCheckpoint(pointer)
        return tiktoken_tokenizer(read_plain(ranks).decode("ascii", "replace"), config, str(ranks))
    merges = read_text(folder / "merges.txt") or ""
    return vocab_tokenizer(read("vocab.json") or {}, merges, config, added, str(folder / "vocab.json"))
