"""tokenizer.json and tokenizer_config.json, made from a GGUF file's metadata.

The ids of a text are those of the tokenizer.json that the model was published with, as far as the metadata describes
it: byte-level BPE by its `pre`, SentencePiece as llama.cpp reads it, a space before each text behind a control token.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from protos.errors import BadCheckpoint
from protos.hints import listed
from protos.model_files.fields import Fields
from protos.model_files.gguf.gguf_config import EMBEDDING
from protos.model_files.gguf.gguf_file import GGUFFile
from protos.model_files.gguf.metadata import GGUFArray
from protos.model_files.gguf.text_splits import SPLITS, Split
from protos.model_files.tokenizers.state import (
    CONTROL,
    NORMAL,
    TokenTable,
    byte_level_parts,
    sentencepiece_parts,
    tokenizer_json,
)

log = logging.getLogger("baton.model")

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|end_of_text|> <|endoftext|> <end_of_turn> <EOT> [EOT] [EOS] </s> "
    "<｜end▁of▁sentence｜> <|return|> <|call|> <end_of_utterance>".split()
)
"""Control tokens that always end an answer, as in llama.cpp. The metadata may list more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFVocabulary:
    fields: Fields  # tokenizer.ggml.*
    texts: list[str]
    types: list[int]
    is_sentencepiece: bool
    split: Split  # of byte-level BPE

    @classmethod
    def of(cls, gguf: GGUFFile) -> GGUFVocabulary:
        """Raises UnsupportedModel for a kind that is not known, BadCheckpoint for contradictory arrays."""
        prefix = "tokenizer.ggml."
        found = {key.removeprefix(prefix): gguf.metadata[key] for key in gguf.metadata if key.startswith(prefix)}
        fields = Fields(found, f"{gguf.path}: tokenizer.ggml")
        kind = fields.text_or("model", "")
        if kind not in ("gpt2", "llama"):
            raise fields.unserved("model", "gpt2 (byte-level BPE) and llama (SentencePiece) are")
        texts = _unique(fields, _array(fields, "tokens", "string"))
        embedding = gguf.tensors.get(EMBEDDING)
        if embedding is not None and len(texts) > embedding.shape[0]:
            raise BadCheckpoint(
                f"{fields.where}.tokens: {len(texts):,} for {embedding.shape[0]:,} rows of {EMBEDDING!r}: "
                "download it again"
            )
        types = _array(fields, "token_type", "int32", len(texts)) if "token_type" in fields else []
        types = types or [NORMAL] * len(texts)
        for index, text in enumerate(texts):
            if text in _ENDS and types[index] == NORMAL:
                types[index] = CONTROL
        is_sentencepiece = kind == "llama"
        split = SPLITS["default"] if is_sentencepiece else _split(fields)
        return cls(fields=fields, texts=texts, types=types, is_sentencepiece=is_sentencepiece, split=split)

    @property
    def tokens(self) -> TokenTable:
        return TokenTable(texts=self.texts, types=self.types, where=f"{self.fields.where}.merges")

    def id_of(self, role: str) -> int | None:
        """The id of "bos", "eos", ...; None if the file names none, or one outside the vocabulary."""
        found = self.fields.integer_or(f"{role}_token_id", None, minimum=0)
        return found if found is not None and found < len(self.texts) else None

    def end_ids(self) -> list[int]:
        named = [self.id_of(role) for role in ("eos", "eot", "eom")]
        marked = (i for i, text in enumerate(self.texts) if text in _ENDS and self.types[i] == CONTROL)
        return list(dict.fromkeys([each for each in named if each is not None] + list(marked)))

    def around(self) -> tuple[int | None, int | None]:
        bos = self.fields.flag("add_bos_token", default=self.is_sentencepiece or self.split.adds_bos)
        eos = self.fields.flag("add_eos_token")
        return self.id_of("bos") if bos else None, self.id_of("eos") if eos else None


def tokenizer_of(gguf: GGUFFile, vocabulary: GGUFVocabulary) -> str:
    original = gguf.metadata.get("tokenizer.huggingface.json")
    if isinstance(original, str):
        return original
    parts = _sentencepiece(vocabulary) if vocabulary.is_sentencepiece else _byte_level(vocabulary)
    return tokenizer_json(vocabulary.tokens, parts, *vocabulary.around())


def tokenizer_config_of(gguf: GGUFFile, vocabulary: GGUFVocabulary) -> dict[str, Any]:
    ids = {name: vocabulary.id_of(role) for name, role in _ROLES.items()}
    config: dict[str, Any] = {name: vocabulary.texts[i] for name, i in ids.items() if i is not None}
    metadata = Fields(gguf.metadata, str(gguf.path))
    prefix = "tokenizer.chat_template."
    templates = {key.removeprefix(prefix): metadata.text_or(key, "") for key in gguf.metadata if key.startswith(prefix)}
    default = metadata.text_or("tokenizer.chat_template", "")
    if default and templates:
        named = {"default": default} | templates
        return config | {"chat_template": [{"name": name, "template": each} for name, each in named.items()]}
    return config | ({"chat_template": default} if default else {})


def _array(fields: Fields, key: str, kind: str, count: int | None = None) -> list[Any]:
    value = fields.raw(key)
    if not isinstance(value, GGUFArray) or value.kind != kind or (count is not None and value.count < count):
        wanted = f"an array of {kind} values" + (f", one for each of {count:,} tokens" if count is not None else "")
        raise fields.wrong(key, wanted)
    return value.values()


def _unique(fields: Fields, texts: list[str]) -> list[str]:
    """Names empty texts, as llama.cpp does."""
    named = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
    if len(set(named)) < len(named):
        again = next(text for text, count in Counter(named).items() if count > 1)
        raise BadCheckpoint(f"{fields.where}.tokens has {again!r} twice: the file is damaged, download it again")
    return named


def _split(fields: Fields) -> Split:
    pre = fields.text_or("pre", None)
    if pre is None:
        log.warning("%s.pre is missing: the model's text may be split wrongly; convert it again", fields.where)
        pre = "default"
    if pre not in SPLITS:
        known = f"known are {listed(list(SPLITS), len(SPLITS))}"
        raise fields.unserved("pre", known, fix="Give --model the Hugging Face checkpoint")
    return SPLITS[pre]


def _byte_level(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    split = vocabulary.split
    merges = [_pair(merge) for merge in _array(vocabulary.fields, "merges", "string")]
    return byte_level_parts(vocabulary.tokens, merges, split.patterns, nfc=split.nfc, ignore_merges=split.ignore_merges)


def _sentencepiece(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    scores = _array(vocabulary.fields, "scores", "float32", len(vocabulary.texts))
    adds_space = vocabulary.fields.flag("add_space_prefix", default=True)
    return sentencepiece_parts(vocabulary.tokens, scores, vocabulary.id_of("unknown"), adds_space=adds_space)


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")
