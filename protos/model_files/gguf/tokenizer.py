"""tokenizer.json and tokenizer_config.json, made from a GGUF file's metadata.

The ids of a text are those of the tokenizer.json that the model was published with, as far as the metadata describes
it: byte-level BPE by its `pre`, SentencePiece as llama.cpp reads it, a space before each text behind a control token.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.hints import listed
from protos.model_files.fields import Fields
from protos.model_files.gguf.config import EMBEDDING
from protos.model_files.gguf.metadata import GGUFArray
from protos.model_files.gguf.reader import GGUFFile
from protos.model_files.gguf.splits import SPLITS, Split

log = logging.getLogger("baton.model")

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_MAX_PIECE = 256  # letters of a piece that others are joined to: SentencePiece makes none above 16 by itself

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
            raise UnsupportedModel(
                f"{fields.where}.model is {kind!r}: gpt2 (byte-level BPE) and llama (SentencePiece) are supported"
            )
        texts = _unique(fields, _array(fields, "tokens", "string"))
        embedding = gguf.tensors.get(EMBEDDING)
        if embedding is not None and len(texts) > embedding.shape[0]:
            raise BadCheckpoint(
                f"{fields.where}.tokens has {len(texts):,} entries, {EMBEDDING!r} has {embedding.shape[0]:,} rows: "
                "download the file again"
            )
        types = _array(fields, "token_type", "int32", len(texts)) if "token_type" in fields else []
        types = types or [_NORMAL] * len(texts)
        for index, text in enumerate(texts):
            if text in _ENDS and types[index] == _NORMAL:
                types[index] = _CONTROL
        is_sentencepiece = kind == "llama"
        split = SPLITS["default"] if is_sentencepiece else _split(fields)
        return cls(fields=fields, texts=texts, types=types, is_sentencepiece=is_sentencepiece, split=split)

    def id_of(self, role: str) -> int | None:
        """Of "bos", "eos", ...; None where the file names none, or one beyond the vocabulary."""
        found = self.fields.integer_or(f"{role}_token_id", None, minimum=0)
        return found if found is not None and found < len(self.texts) else None

    def end_ids(self) -> list[int]:
        """Of tokens that end an answer."""
        named = [self.id_of(role) for role in ("eos", "eot", "eom")]
        marked = (i for i, text in enumerate(self.texts) if text in _ENDS and self.types[i] == _CONTROL)
        return list(dict.fromkeys([one for one in named if one is not None] + list(marked)))

    def around(self) -> tuple[int | None, int | None]:
        """The tokens that begin and end a text."""
        bos = self.fields.flag("add_bos_token", default=self.is_sentencepiece or self.split.adds_bos)
        eos = self.fields.flag("add_eos_token")
        return self.id_of("bos") if bos else None, self.id_of("eos") if eos else None


def tokenizer_of(gguf: GGUFFile, vocabulary: GGUFVocabulary) -> str:
    """tokenizer.json."""
    original = gguf.metadata.get("tokenizer.huggingface.json")
    if isinstance(original, str):
        return original
    parts = _sentencepiece(vocabulary) if vocabulary.is_sentencepiece else _byte_level(vocabulary)
    state = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(_added(vocabulary))} | parts
    return json.dumps(state | {"post_processor": _template(vocabulary)}, ensure_ascii=False)


def tokenizer_config_of(gguf: GGUFFile, vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """Named tokens, and the chat templates."""
    ids = {name: vocabulary.id_of(role) for name, role in _ROLES.items()}
    config: dict[str, Any] = {name: vocabulary.texts[i] for name, i in ids.items() if i is not None}
    metadata = Fields(gguf.metadata, str(gguf.path))
    prefix = "tokenizer.chat_template."
    templates = {key.removeprefix(prefix): metadata.text_or(key, "") for key in gguf.metadata if key.startswith(prefix)}
    default = metadata.text_or("tokenizer.chat_template", "")
    if default and templates:
        named = {"default": default} | templates
        return config | {"chat_template": [{"name": name, "template": one} for name, one in named.items()]}
    return config | ({"chat_template": default} if default else {})


def _array(fields: Fields, key: str, kind: str, count: int | None = None) -> list[Any]:
    value = fields.raw(key)
    if not isinstance(value, GGUFArray) or value.kind != kind or (count is not None and value.count < count):
        wanted = f"an array of {kind} values" + (f", one for each of {count:,} tokens" if count is not None else "")
        raise BadCheckpoint(
            f"{fields.where}.{key} is {value!r}: it must be {wanted}. Download the file again", param=key
        )
    return value.values()


def _unique(fields: Fields, texts: list[str]) -> list[str]:
    """Empty ones get a name, as in llama.cpp."""
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
        raise UnsupportedModel(
            f"{fields.where}.pre is {pre!r}, which is not known: known are {listed(list(SPLITS), len(SPLITS))}. "
            "Give --model the Hugging Face checkpoint"
        )
    return SPLITS[pre]


def _added(vocabulary: GGUFVocabulary) -> Iterator[dict[str, Any]]:
    for index, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=False)):
        if kind in (_UNKNOWN, _CONTROL, _USER):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": index, "content": text} | flags | {"special": kind != _USER}


def _words(vocabulary: GGUFVocabulary) -> dict[str, int]:
    """All tokens but those at the end that no text becomes by itself: added tokens are numbered after the words, and
    unused ones pad the embedding to a round number of rows."""
    size = len(vocabulary.texts)
    while size and vocabulary.types[size - 1] in (_CONTROL, _USER, _UNUSED):
        size -= 1
    ends = [i for i in range(size, len(vocabulary.texts)) if vocabulary.types[i] == _UNUSED]
    last_added = max((i for i in range(size, len(vocabulary.texts)) if vocabulary.types[i] != _UNUSED), default=-1)
    if any(i < last_added for i in ends):  # numbers of added tokens would not follow one another
        size = last_added + 1
    return {text: index for index, text in enumerate(vocabulary.texts[:size])}


def _byte_level(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    split = vocabulary.split
    merges = [_pair(merge) for merge in _array(vocabulary.fields, "merges", "string")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": _bpe(vocabulary, merges, ignore_merges=split.ignore_merges),
    }


def _sentencepiece(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    adds_space = vocabulary.fields.flag("add_space_prefix", default=True)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    prefix = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    plain = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    unknown = vocabulary.id_of("unknown")
    model = _bpe(
        vocabulary,
        list(_merges_by_score(vocabulary)),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, *spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [plain, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
    }


def _bpe(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    words = _words(vocabulary)
    for first, second in merges:
        if first not in words or second not in words or first + second not in words:
            raise BadCheckpoint(
                f"{vocabulary.fields.where}.merges has {first!r} + {second!r}, which are no tokens: the file is "
                "damaged, download it again"
            )
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model = {"type": "BPE"} | plain | {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False} | options
    return model | {"vocab": words, "merges": merges}


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")


def _merges_by_score(vocabulary: GGUFVocabulary) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best score first: SentencePiece joins by the score of the whole. Of
    equal ones the order is that of transformers' converter (`generate_merges`), which made the published files."""
    scores = _array(vocabulary.fields, "scores", "float32", len(vocabulary.texts))
    ids = {
        text: index
        for index, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=False))
        if kind in (_NORMAL, _USER)
    }
    pairs = [
        (-scores[index], -at, at - len(text), index, text[:at], text[at:])
        for text, index in ids.items()
        if len(text) <= _MAX_PIECE
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    pairs.sort(key=lambda pair: pair[:4])
    return ((pair[4], pair[5]) for pair in pairs)


def _template(vocabulary: GGUFVocabulary) -> dict[str, Any] | None:
    """What is put round a text."""
    first, last = vocabulary.around()
    if first is None and last is None:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    named = {one: vocabulary.texts[one] for one in (first, last) if one is not None}
    begin = [{"SpecialToken": {"id": named[first], "type_id": 0}}] if first is not None else []
    end = [{"SpecialToken": {"id": named[last], "type_id": 0}}] if last is not None else []
    return {
        "type": "TemplateProcessing",
        "single": [*begin, text[0], *end],
        "pair": [*begin, text[0], *end, *begin, text[1], *end],
        "special_tokens": {word: {"id": word, "ids": [one], "tokens": [word]} for one, word in named.items()},
    }
