"""The bytes every token stands for, read once from a tokenizer's decoder.

Text is then made by joining bytes and decoding UTF-8 as it goes: one table look-up a token, and a character is never
shown before it is whole. Two decoders cover the models served here: byte-level BPE (GPT-2, Llama 3, Qwen) and
SentencePiece with byte fallback (Llama 2, Mistral). Any other is refused by name.
"""

from __future__ import annotations

import ctypes
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson
import tokenizers

from protos.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`token_bytes[id]` for every id, b"" for ids without a token; `special` ids are left out of an answer's text.

    A text begins with `leading_space` spaces that belong to the tokenizer and not to the text (SentencePiece).
    """

    token_bytes: tuple[bytes, ...]
    special: frozenset[int]
    leading_space: int = 0
    _texts: dict[int, str | None] = field(default_factory=dict, repr=False, compare=False)
    _texts_of_all: list[TokenColumns] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Vocabulary:
        decoder = json.loads(backend.to_str())["decoder"]
        steps = _Steps(decoder)
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        table = [b""] * size
        for token, token_id in backend.get_vocab(with_added_tokens=True).items():
            table[token_id] = steps.bytes_of(token)
        special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        return cls(token_bytes=tuple(table), special=special, leading_space=steps.leading_space)

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for an id beyond the tokenizer's vocabulary: models pad their embedding to a round number of rows."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def whole_text(self, token_id: int) -> str | None:
        """The token's text after complete characters; None for a token with parts of characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.bytes_of(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    @property
    def texts(self) -> TokenColumns:
        if not self._texts_of_all:
            self._texts_of_all.append(TokenColumns(map(self.whole_text, range(len(self.token_bytes))), self.special))
        return self._texts_of_all[0]


class TokenColumns:
    """Texts of tokens as router/streaming/token_sink.c reads them: None for tokens with parts of characters."""

    class _Columns(ctypes.Structure):
        _fields_ = (
            ("text", ctypes.c_char_p), ("json", ctypes.c_char_p), ("text_ends", ctypes.c_void_p),
            ("json_ends", ctypes.c_void_p), ("kinds", ctypes.c_char_p), ("num", ctypes.c_uint32),
        )  # fmt: skip

    def __init__(self, texts: Iterable[str | None], special: frozenset[int]) -> None:
        columns_of_text = list(texts)
        raw = [text.encode() if text is not None else b"" for text in columns_of_text]
        quoted = [orjson.dumps(text)[1:-1] if text is not None else b"" for text in columns_of_text]
        kinds = bytes(0 if text is None else 2 if i in special else 1 for i, text in enumerate(columns_of_text))
        self._ends = [array("I", accumulate(map(len, column), initial=0)) for column in (raw, quoted)]
        columns = self._columns = self._Columns(
            b"".join(raw),
            b"".join(quoted),
            *(ends.buffer_info()[0] for ends in self._ends),
            kinds,
            len(columns_of_text),
        )
        self.address = ctypes.addressof(columns)


class _Steps:
    """A decoder's description, reduced to its effect on one token."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.leading_space = 0
        for step in _flattened(decoder):
            self._read(step)

    def _read(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.leading_space = start
            case {"type": "Metaspace", "replacement": str(mark), **rest}:
                self._replacements.append((mark, " "))
                self.leading_space = 0 if rest.get("prepend_scheme") == "never" else 1
            case _:
                raise UnsupportedModel(
                    f"tokenizer.json has the decoder step {json.dumps(step)}; Baton reads ByteLevel decoders and "
                    "SentencePiece ones (Replace, ByteFallback, Fuse, Strip, Metaspace)"
                )

    def bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            # Like the `tokenizers` library: a token with a foreign character (an added token) stands for itself.
            mapped = [_ALPHABET.get(char) for char in token]
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _flattened(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        raise UnsupportedModel("tokenizer.json has no decoder, so its tokens cannot be turned back into text")
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flattened(step)
    else:
        yield decoder
