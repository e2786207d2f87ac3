"""tokenizer.model: a SentencePiece model."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from protos.errors import BadCheckpoint, UnsupportedModel
from protos.model_files.tokenizers.state import (
    BYTE,
    UNKNOWN,
    TokenTable,
    sentencepiece_parts,
    tokenizer_json,
    with_added,
)
from protos.sentencepiece_pb2 import SentencePieceModel


def sentencepiece_tokenizer(content: bytes, config: Mapping[str, Any], added: Mapping[str, Any], where: str) -> str:
    """tokenizer.json. `config` is tokenizer_config.json, `added` is added_tokens.json.

    Raises BadCheckpoint for a damaged file, UnsupportedModel for a kind of model that is not served.
    """
    try:
        model = SentencePieceModel.FromString(content)
        texts = [piece.piece for piece in model.pieces]
    except (DecodeError, ValueError) as error:
        raise BadCheckpoint(f"{where} is no SentencePiece model ({error}): download it again") from error
    types: list[int] = [piece.type for piece in model.pieces]
    if UNKNOWN not in types:
        raise BadCheckpoint(f"{where} has {len(texts)} pieces and no unknown one: download it again")
    kind, normalizer = model.trainer.model_type, model.normalizer
    if kind not in (SentencePieceModel.UNIGRAM, SentencePieceModel.BPE):
        raise UnsupportedModel(f"{where} is a {SentencePieceModel.Kind.Name(kind)} model: BPE and UNIGRAM are served")
    tokens = with_added(TokenTable(texts=texts, types=types, where=where), config, added)
    parts = sentencepiece_parts(
        tokens,
        [piece.score for piece in model.pieces],
        types.index(UNKNOWN),
        adds_space=normalizer.add_dummy_prefix,
        first_only=config.get("legacy") is False,
        byte_fallback=BYTE in types,
        unigram=kind == SentencePieceModel.UNIGRAM,
    )
    parts["normalizer"]["normalizers"][:0] = _normalizers(normalizer)
    bos, eos = (_named(tokens, config, role, getattr(model.trainer, f"{role}_id")) for role in ("bos", "eos"))
    first = bos if config.get("add_bos_token", True) else None
    return tokenizer_json(tokens, parts, first, eos if config.get("add_eos_token") else None)


def _normalizers(normalizer: SentencePieceModel.Normalizer) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if charsmap := normalizer.precompiled_charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _named(tokens: TokenTable, config: Mapping[str, Any], role: str, number: int) -> int | None:
    by_text = tokens.find(config.get(f"{role}_token"))
    if by_text is not None:
        return by_text
    return number if 0 <= number < len(tokens.texts) else None
