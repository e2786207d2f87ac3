"""The special tokens that a checkpoint names outside of its tokenizer.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from protos.errors import BadCheckpoint
from protos.model_files.tokenizers.state import added_token, listed_texts, numbered_tokens, text_of

log = logging.getLogger("baton.model")

Read = Callable[[str], Mapping[str, Any] | None]
"""The JSON object in a file of the model; None where there is no such file."""

_FILES = ("special_tokens_map.json", "tokenizer_config.json")


class _Added(msgspec.Struct):
    content: str
    id: int


class _Model(msgspec.Struct):
    vocab: msgspec.Raw


class _Tokenizer(msgspec.Struct):
    """The tokens of a tokenizer.json, read in a hundredth of the whole file's time."""

    model: _Model
    added_tokens: list[_Added] = []

    def ids(self) -> dict[str, int]:
        """Ids by text. The vocabulary of a unigram model is a list of words with scores."""
        vocab = msgspec.json.decode(self.model.vocab)
        words = vocab if isinstance(vocab, dict) else {word: index for index, (word, *_) in enumerate(vocab)}
        return words | {token.content: token.id for token in self.added_tokens}


def named_tokens(read: Read) -> dict[str, str]:
    fields = {key: value for name in _FILES for key, value in (read(name) or {}).items()}
    texts = {key: text_of(value) for key, value in fields.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if text is not None}


def token_id(tokenizer: str, text: str) -> int | None:
    """The id of a token by its text; None if tokenizer.json lacks it."""
    stored = _read(tokenizer)
    return stored.ids().get(text) if stored is not None else None


def with_named(tokenizer: str, read: Read, where: str) -> str:
    """tokenizer.json with tokens that only other files have, numbered as transformers does: a word keeps its number,
    and new tokens follow one another. Tokens beyond config.json's `vocab_size` have no embedding and are left out.
    Raises BadCheckpoint where a file numbers a token otherwise."""
    stored = _read(tokenizer)
    if stored is None:
        return tokenizer
    special = [*named_tokens(read).values(), *(text for name in _FILES for text in listed_texts(read(name) or {}))]
    named = numbered_tokens(read("tokenizer_config.json") or {}, read("added_tokens.json") or {}, special)
    present, missing = {token.content for token in stored.added_tokens}, dict[str, dict[str, Any]]()
    for token in [*named, *(added_token(text, special=True) for text in special)]:
        if token["content"] not in present:
            missing.setdefault(token["content"], token)
    if not missing:
        return tokenizer
    state, ids, size = json.loads(tokenizer), stored.ids(), (read("config.json") or {}).get("vocab_size")
    for text, token in missing.items():
        following = max(ids.values(), default=-1) + 1
        number = ids.get(text, token.get("id", following))
        if isinstance(size, int) and number >= size:
            log.warning("%s: the token %r has no embedding among the model's %d and is left out", where, text, size)
            continue
        if number > following:
            raise BadCheckpoint(f"{where}: the added token {text!r} is {number}, there is none with number {following}")
        ids[text] = number
        state["added_tokens"].append(token | {"id": number})
    state["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(state, ensure_ascii=False)


def _read(tokenizer: str) -> _Tokenizer | None:
    """None for what the tokenizer's own reader will refuse."""
    try:
        return msgspec.json.decode(tokenizer, type=_Tokenizer)
    except (msgspec.DecodeError, TypeError, ValueError):
        return None
