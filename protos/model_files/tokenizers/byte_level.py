"""Byte-level BPE in the files of GPT-2 (vocab.json with merges.txt) and of Mistral (tekken.json)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.tokenizers.state import (
    CONTROL,
    NORMAL,
    TokenTable,
    byte_level_parts,
    tokenizer_json,
    with_added,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"GPT2Tokenizer": (_GPT2, False), "Qwen2Tokenizer": (_QWEN2, True)}
"""By tokenizer_class: the pattern, and whether text is normalised to NFC."""


def vocab_tokenizer(
    vocab: Mapping[str, Any], merges: str, config: Mapping[str, Any], added: Mapping[str, Any], where: str
) -> str:
    """tokenizer.json of vocab.json and merges.txt. How text is split is that of the class in tokenizer_config.json.

    Raises UnsupportedModel for another class, BadCheckpoint for files that contradict each other.
    """
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name not in _SPLITS:
        raise UnsupportedModel(
            f"{where}: tokenizer_class in tokenizer_config.json is {config.get('tokenizer_class')!r}: of vocab.json "
            f"with merges.txt {', '.join(_SPLITS)} are served. Write tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    pattern, nfc = _SPLITS[name]
    if sorted(vocab.values(), key=repr) != sorted(range(len(vocab)), key=repr):
        raise BadCheckpoint(f"{where} must give each of its {len(vocab)} tokens a number of its own from 0 on")
    texts = sorted(vocab, key=vocab.__getitem__)
    tokens = TokenTable(texts=texts, types=[NORMAL] * len(texts), where="merges.txt")
    tokens = with_added(tokens, config, added)
    pairs = [line.split(" ") for line in merges.split("\n") if line and not line.startswith("#version")]
    if bad := next((pair for pair in pairs if len(pair) != 2), None):
        raise BadCheckpoint(f"{where}: merges.txt has {' '.join(bad)!r}: each line must have two tokens")
    parts = byte_level_parts(tokens, [(first, second) for first, second in pairs], (pattern,), nfc=nfc)
    first = tokens.find(config.get("bos_token")) if config.get("add_bos_token") else None
    return tokenizer_json(tokens, parts, first, None)


def tekken_tokenizer(tekken: Mapping[str, Any], where: str) -> str:
    """tokenizer.json of tekken.json: tokens by rank, behind the special ones; merges by the rank of what they make."""
    try:
        sizes = tekken["config"]
        num_special, size = int(sizes["default_num_special_tokens"]), int(sizes["default_vocab_size"])
        pattern = str(sizes["pattern"])
        entries = tekken["vocab"][: size - num_special]
        words = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        named = {int(one["rank"]): str(one["token_str"]) for one in tekken.get("special_tokens") or ()}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BadCheckpoint(f"{where} is no tekken file ({error!r}): download it again") from error
    if len(set(words)) < len(words) or not {bytes([one]) for one in range(256)} <= set(words):
        raise BadCheckpoint(f"{where} must have each byte as a token, and no token twice: download it again")
    defaults = {0: "<unk>", 1: "<s>", 2: "</s>"}
    special = [named.get(one) or defaults.get(one) or f"<SPECIAL_{one}>" for one in range(num_special)]
    letters = _letters()
    texts = special + ["".join(letters[byte] for byte in word) for word in words]
    tokens = TokenTable(
        texts=texts, types=[CONTROL] * num_special + [NORMAL] * len(words), where=f"{where}: its vocabulary"
    )
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = [
        (ranks[word], ranks[word[:at]], ranks[word[at:]])
        for word in words
        for at in range(1, len(word))
        if word[:at] in ranks and word[at:] in ranks
    ]
    pairs = [(texts[num_special + first], texts[num_special + second]) for _, first, second in sorted(merges)]
    parts = byte_level_parts(tokens, pairs, (pattern,), ignore_merges=True)
    return tokenizer_json(tokens, parts, tokens.find("<s>"), None)


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
