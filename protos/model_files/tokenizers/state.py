"""The content of a tokenizer.json, as the `tokenizers` library reads it, from a table of tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.errors import BadCheckpoint

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # SentencePiece's types of pieces, and GGUF's

_MAX_PIECE = 256  # letters of a piece that may be joined; SentencePiece makes none above 16

Parts = dict[str, Any]
"""normalizer, pre_tokenizer, decoder and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Text and type of each token, by its id. `where` names the merges in messages."""

    texts: list[str]
    types: list[int]
    where: str

    def find(self, named: object) -> int | None:
        """The id of a token by its text, or by its entry of tokenizer_config.json."""
        text = text_of(named)
        return self.texts.index(text) if text is not None and text in self.texts else None


def with_added(tokens: TokenTable, config: Mapping[str, Any], added: Mapping[str, Any]) -> TokenTable:
    """The table with the tokens of tokenizer_config.json's `added_tokens_decoder`, or of added_tokens.json, which are
    special where tokenizer_config.json names them. Raises BadCheckpoint where they are malformed, or where their ids
    leave some out."""
    special = {*map(text_of, config.values()), *listed_texts(config)}
    found = {token["id"]: (token["content"], token["special"]) for token in numbered_tokens(config, added, special)}
    texts, types = list(tokens.texts), list(tokens.types)
    for index, (text, special) in sorted(found.items()):
        if index > len(texts):
            raise BadCheckpoint(
                f"{tokens.where}: the added token {text!r} is {index}, there is none with number {len(texts)}"
            )
        if index == len(texts):
            texts.append(text)
            types.append(CONTROL)
        if texts[index] == text and types[index] != UNKNOWN:
            types[index] = CONTROL if special else USER
    return TokenTable(texts=texts, types=types, where=tokens.where)


def numbered_tokens(
    config: Mapping[str, Any], added: Mapping[str, Any], special: Collection[str | None]
) -> list[dict[str, Any]]:
    """Entries of tokenizer.json's `added_tokens`, in their order, from `config` (tokenizer_config.json) and `added`
    (added_tokens.json), whose tokens are special where `special` has them. Raises BadCheckpoint."""
    found = {
        _number(index, "added_tokens.json"): added_token(text, normalized=text not in special, special=text in special)
        for text, index in added.items()
    }
    for number, token in (_field(config, "added_tokens_decoder", (dict,)) or {}).items():
        where = f"tokenizer_config.json: added_tokens_decoder[{number!r}]"
        text = text_of(token)
        if text is None or not isinstance(token, dict):
            raise BadCheckpoint(f"{where} is {_short(token)}: it must be an object with a string 'content'")
        found[_number(number, where)] = added_token(text, **{flag: bool(token.get(flag)) for flag in _FLAGS})
    return [found[number] | {"id": number} for number in sorted(found)]


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def added_token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, **dict.fromkeys(_FLAGS, False), **flags}


def listed_texts(config: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens in the lists of tokenizer_config.json or special_tokens_map.json. Raises BadCheckpoint."""
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = _field(config, name, (list, dict)) or ()
        for token in listed.values() if isinstance(listed, dict) else listed:
            if (text := text_of(token)) is not None:
                yield text


def _field(config: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    """A field of tokenizer_config.json that may be absent or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, kinds):
        expected = "a list" if list in kinds else "an object"
        raise BadCheckpoint(f"tokenizer_config.json: {name} is {_short(value)}: it must be {expected}")
    return value


def _number(given: Any, where: str) -> int:
    try:
        return int(given)
    except (TypeError, ValueError):
        raise BadCheckpoint(f"{where} has the token id {_short(given)}: it must be an integer") from None


def _short(value: Any) -> str:
    return repr(value)[:60]


def text_of(token: object) -> str | None:
    """The text of a token that is a string, or an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def tokenizer_json(tokens: TokenTable, parts: Parts, first: int | None, last: int | None) -> str:
    """`first` and `last` are the tokens that begin and end a text."""
    state = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(_added(tokens))} | parts
    return json.dumps(state | {"post_processor": _template(tokens, first, last)}, ensure_ascii=False)


def byte_level_parts(
    tokens: TokenTable,
    merges: list[tuple[str, str]],
    patterns: Sequence[str],
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
) -> Parts:
    """BPE over bytes, after a split of the text by `patterns`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": _bpe(tokens, merges, ignore_merges=ignore_merges),
    }


def sentencepiece_parts(
    tokens: TokenTable,
    scores: Sequence[float],
    unknown: int | None,
    *,
    adds_space: bool,
    first_only: bool = False,
    byte_fallback: bool = True,
    unigram: bool = False,
) -> Parts:
    """SentencePiece's BPE, which joins by the score of the result, or its unigram model. `adds_space` puts a space
    before a text, and before each part after a special token unless `first_only`."""
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    prefix = [{"type": "Prepend", "prepend": "▁"}] if adds_space and not first_only else []
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    plain = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    model: dict[str, Any]
    if unigram:
        pairs = [[text, score] for text, score in zip(tokens.texts, scores, strict=False)]
        model = {"type": "Unigram", "unk_id": unknown, "vocab": pairs, "byte_fallback": byte_fallback}
    else:
        model = _bpe(
            tokens,
            list(_merges_by_score(tokens, scores)),
            unk_token=None if unknown is None else tokens.texts[unknown],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, *spaces]},
        "pre_tokenizer": metaspace if adds_space and first_only else None,
        "decoder": {"type": "Sequence", "decoders": [plain, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
    }


def _added(tokens: TokenTable) -> Iterator[dict[str, Any]]:
    for index, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=False)):
        if kind in (UNKNOWN, CONTROL, USER):
            yield {"id": index} | added_token(text, special=kind != USER)


def _words(tokens: TokenTable) -> dict[str, int]:
    """Words: all tokens but special ones at the end. Added tokens are numbered after the words, and unused ones pad the
    embedding."""
    size = len(tokens.texts)
    while size and tokens.types[size - 1] in (CONTROL, USER, UNUSED):
        size -= 1
    ends = [i for i in range(size, len(tokens.texts)) if tokens.types[i] == UNUSED]
    last_added = max((i for i in range(size, len(tokens.texts)) if tokens.types[i] != UNUSED), default=-1)
    if any(i < last_added for i in ends):  # the numbers of added tokens would have gaps
        size = last_added + 1
    return {text: index for index, text in enumerate(tokens.texts[:size])}


def _bpe(tokens: TokenTable, merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    words = _words(tokens)
    for first, second in merges:
        if first not in words or second not in words or first + second not in words:
            raise BadCheckpoint(
                f"{tokens.where} has {first!r} + {second!r}, which are no tokens: download the file again"
            )
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model = {"type": "BPE"} | plain | {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False} | options
    return model | {"vocab": words, "merges": merges}


def _merges_by_score(tokens: TokenTable, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that makes a token, the best score first, as SentencePiece joins. Ties follow transformers'
    converter (`generate_merges`), which made the published files."""
    ids = {
        text: index
        for index, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=False))
        if kind in (NORMAL, USER)
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


def _template(tokens: TokenTable, first: int | None, last: int | None) -> dict[str, Any] | None:
    if first is None and last is None:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    named = {each: tokens.texts[each] for each in (first, last) if each is not None}
    begin = [{"SpecialToken": {"id": named[first], "type_id": 0}}] if first is not None else []
    end = [{"SpecialToken": {"id": named[last], "type_id": 0}}] if last is not None else []
    return {
        "type": "TemplateProcessing",
        "single": [*begin, text[0], *end],
        "pair": [*begin, text[0], *end, *begin, text[1], *end],
        "special_tokens": {word: {"id": word, "ids": [each], "tokens": [word]} for each, word in named.items()},
    }
