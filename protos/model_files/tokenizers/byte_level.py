"""Byte-level BPE in the files of GPT-2 (vocab.json with merges.txt), of Mistral (tekken.json) and of Kimi
(tiktoken.model)."""

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
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Kimi K2's tokenization_kimi.py."""
_WRITE = "Write tokenizer.json with AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers"
_KIMI_RESERVED = 256  # numbers behind the words, named or not


def vocab_tokenizer(
    vocab: Mapping[str, Any], merges: str, config: Mapping[str, Any], added: Mapping[str, Any], where: str
) -> str:
    """tokenizer.json of vocab.json and merges.txt. The class in tokenizer_config.json decides how text is split. Raises
    UnsupportedModel for an unknown class, BadCheckpoint for files that contradict each other."""
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name not in _SPLITS:
        kind = f"tokenizer_class in tokenizer_config.json is {config.get('tokenizer_class')!r}"
        raise UnsupportedModel(
            f"{where}: {kind}: with vocab.json and merges.txt {' and '.join(_SPLITS)} are served. {_WRITE}"
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
    """tokenizer.json of tekken.json: special tokens, then tokens by rank; merges by the rank of their result."""
    try:
        sizes = tekken["config"]
        num_special, size = int(sizes["default_num_special_tokens"]), int(sizes["default_vocab_size"])
        pattern = str(sizes["pattern"])
        entries = tekken["vocab"][: size - num_special]
        words = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        named = {int(token["rank"]): str(token["token_str"]) for token in tekken.get("special_tokens") or ()}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BadCheckpoint(f"{where} is no tekken file ({error!r}): download it again") from error
    defaults = {0: "<unk>", 1: "<s>", 2: "</s>"}
    special = [named.get(number) or defaults.get(number) or f"<SPECIAL_{number}>" for number in range(num_special)]
    texts, pairs = _by_rank(words, where)
    tokens = TokenTable(
        texts=special + texts,
        types=[CONTROL] * num_special + [NORMAL] * len(words),
        where=f"{where}: its vocabulary",
    )
    parts = byte_level_parts(tokens, pairs, (pattern,), ignore_merges=True)
    return tokenizer_json(tokens, parts, tokens.find("<s>"), None)


def tiktoken_tokenizer(content: str, config: Mapping[str, Any], where: str) -> str:
    """tokenizer.json of Kimi's tiktoken.model, with a word and its rank in each line. Raises UnsupportedModel for other
    models, whose pattern is in their code, BadCheckpoint for a damaged file."""
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        kind = f"tokenizer_class in tokenizer_config.json is {config.get('tokenizer_class')!r}"
        raise UnsupportedModel(f"{where}: {kind}: of tiktoken.model TikTokenTokenizer (Kimi) is served. {_WRITE}")
    try:
        lines = [line.split() for line in content.splitlines() if line.strip()]
        by_rank = {int(rank): base64.b64decode(word, validate=True) for word, rank in lines}
        words = [by_rank[rank] for rank in range(len(lines))]
    except (KeyError, ValueError, binascii.Error) as error:
        raise BadCheckpoint(f"{where} is no tiktoken file ({error!r}): download it again") from error
    texts, pairs = _by_rank(words, where)
    named = config.get("added_tokens_decoder")
    numbers = range(len(words), len(words) + _KIMI_RESERVED)
    reserved = {str(number): {"content": f"<|reserved_token_{number}|>", "special": True} for number in numbers}
    added = reserved | (named if isinstance(named, dict) else {})
    tokens = TokenTable(texts=texts, types=[NORMAL] * len(texts), where=where)
    tokens = with_added(tokens, {**config, "added_tokens_decoder": added}, {})
    return tokenizer_json(tokens, byte_level_parts(tokens, pairs, (KIMI,), ignore_merges=True), None, None)


def _by_rank(words: list[bytes], where: str) -> tuple[list[str], list[tuple[str, str]]]:
    if len(set(words)) < len(words) or not {bytes([number]) for number in range(256)} <= set(words):
        raise BadCheckpoint(f"{where} must have each byte as a token, and no token twice: download it again")
    letters = _letters()
    texts = ["".join(letters[byte] for byte in word) for word in words]
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = [
        (ranks[word], ranks[word[:at]], ranks[word[at:]])
        for word in words
        for at in range(1, len(word))
        if word[:at] in ranks and word[at:] in ranks
    ]
    return texts, [(texts[first], texts[second]) for _, first, second in sorted(merges)]


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
