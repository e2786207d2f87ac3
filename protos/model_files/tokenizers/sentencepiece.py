"""tokenizer.model: SentencePiece's ModelProto (google/sentencepiece: src/sentencepiece_model.proto)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.tokenizers.state import (
    BYTE,
    NORMAL,
    UNKNOWN,
    TokenTable,
    sentencepiece_parts,
    tokenizer_json,
    with_added,
)

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.model_type
_KINDS = {3: "words", 4: "characters"}


def sentencepiece_tokenizer(content: bytes, config: Mapping[str, Any], added: Mapping[str, Any], where: str) -> str:
    """tokenizer.json. `config` is tokenizer_config.json, `added` is added_tokens.json.

    Raises BadCheckpoint for a damaged file, UnsupportedModel for a kind of model that is not served.
    """
    try:
        model = _grouped(content)
        pieces = [_grouped(piece) for piece in model.get(1, ())]
        trainer, normalizer = (_grouped(model.get(part, (b"",))[-1]) for part in (2, 3))
        texts = [piece[1][-1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece[2][-1])[0] if 2 in piece else 0.0 for piece in pieces]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise BadCheckpoint(f"{where} is no SentencePiece model ({error!r}): download it again") from error
    types = [_number(piece, 3, NORMAL) for piece in pieces]
    if not texts or UNKNOWN not in types:
        raise BadCheckpoint(f"{where} has {len(texts)} pieces and no unknown one: download it again")
    kind = _number(trainer, 3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise UnsupportedModel(f"{where} is a model of {_KINDS.get(kind, kind)}: BPE and unigram are served")
    tokens = with_added(TokenTable(texts=texts, types=types, where=where), config, added)
    parts = sentencepiece_parts(
        tokens,
        scores,
        types.index(UNKNOWN),
        adds_space=bool(_number(normalizer, 3, 1)),
        first_only=config.get("legacy") is False,
        byte_fallback=BYTE in types,
        unigram=kind == _UNIGRAM,
    )
    steps = _normalizers(normalizer)
    if steps:
        parts["normalizer"]["normalizers"] = [*steps, *parts["normalizer"]["normalizers"]]
    bos, eos = (_named(tokens, config, role, trainer, field) for role, field in (("bos", 41), ("eos", 42)))
    first = bos if config.get("add_bos_token", True) else None
    return tokenizer_json(tokens, parts, first, eos if config.get("add_eos_token") else None)


def _normalizers(spec: Mapping[int, list[Any]]) -> list[dict[str, Any]]:
    """What SentencePiece does to a text before its spaces are escaped."""
    charsmap = spec.get(2, (b"",))[-1]
    steps: list[dict[str, Any]] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if _number(spec, 4, 1):  # remove_extra_whitespaces
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _named(
    tokens: TokenTable, config: Mapping[str, Any], role: str, trainer: Mapping[int, list[Any]], field: int
) -> int | None:
    """By the text in tokenizer_config.json, else by the model."""
    by_text = tokens.find(config.get(f"{role}_token"))
    if by_text is not None:
        return by_text
    found = _number(trainer, field, 1 if role == "bos" else 2)
    return found if 0 <= found < len(tokens.texts) else None


def _number(fields: Mapping[int, list[Any]], field: int, default: int) -> int:
    value = fields.get(field, [default])[-1]
    if not isinstance(value, int):
        return default
    return value - (1 << 64) if value >= 1 << 63 else value


def _grouped(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number. Raises ValueError for a message that ends within one."""
    found: dict[int, list[Any]] = {}
    for field, value in _fields(message):
        found.setdefault(field, []).append(value)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > len(message):
            raise ValueError(f"field {key >> 3} at byte {at} is cut off")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError(f"the number at byte {at} is cut off")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
