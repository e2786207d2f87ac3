"""Text to token ids and back, with the model's own tokenizer.json. Nothing is ever downloaded."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import tokenizers

from protos.errors import BadCheckpoint
from protos.hints import lfs_pointer
from protos.model_files.files_seam import ModelFiles
from protos.model_files.tokenizers.special_tokens import named_tokens
from router.text.control import ControlTexts, Rendered, Span
from router.text.plain_tokenizer import PlainTokenizer, read_texts
from router.text.stretches import Part, Stretches
from router.text.vocabulary import Vocabulary

# Longer texts take a millisecond or more: they are encoded and decoded on a thread.
LONG_TEXT_CHARS = 2_000
LONG_TEXT_TOKENS = 2_000
MAX_THREADS = 8

# Normalizers and pre-tokenizers that never drop text; NFC joins at most four characters into one.
_KEEPS_TEXT = {"Sequence", "Prepend", "Replace", "ByteLevel", "Split", "Digits", "Metaspace", "NFC"}
_NFC_CHARS = 4


MAX_GROWTH = 256
"""Times that a tokenizer may make a text longer."""


class Tokenizer:
    """Thread-safe; its own threads end with it.

    `named_tokens` are the special tokens by role (bos_token, eos_token, ...), for chat templates. Raises BadCheckpoint.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, named_tokens: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        # The library would hand every batch, also one of a single text, to threads of its own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        num_threads = max(2, min(os.cpu_count() or 1, MAX_THREADS))
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="tokenize")
        self.vocabulary = Vocabulary.of(backend)
        self.named_tokens = dict(named_tokens or {})
        added = backend.get_added_tokens_decoder().values()
        self.added_tokens = {token.content: token.special for token in added}
        """Texts with a token of their own, and whether that is special."""
        state = json.loads(backend.to_str())
        if (growth := _growth([state["normalizer"], state["decoder"]])) > MAX_GROWTH:
            raise BadCheckpoint(
                f"the tokenizer's steps make a text up to {growth:g} times as long, more than {MAX_GROWTH}: "
                "download the checkpoint again"
            )
        self._rewritten = {token.content for token in added if token.normalized and _rewrites(state["normalizer"])}
        self.plain: dict[frozenset[str], PlainTokenizer] = {}
        self.stretches = Stretches(backend, self.read_parts)
        self._max_token_chars = _max_token_chars(state, self.vocabulary)

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        text, where = files.text("tokenizer.json"), files.where("tokenizer.json")
        if text is None:
            raise BadCheckpoint(_no_tokenizer(files))
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself
            pointer = lfs_pointer(files.path / "tokenizer.json")
            raise BadCheckpoint(pointer or f"{where} is not a tokenizer: {error}") from error
        return cls(backend, named_tokens=named_tokens(files.json))

    @cached_property
    def controls(self) -> ControlTexts:
        return ControlTexts(self.added_tokens)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Token ids of each text; `add_special_tokens` adds the tokenizer's own around a text (mostly bos)."""
        if sum(map(len, texts)) <= LONG_TEXT_CHARS:
            return self._encode(texts, add_special_tokens)
        loop, pool = asyncio.get_running_loop(), self._pool
        each = [loop.run_in_executor(pool, self._encode, [text], add_special_tokens) for text in texts]
        return [ids for [ids] in await asyncio.gather(*each)]

    async def encode_rendered(self, rendered: Rendered, *, salt: bytes | None = None) -> tuple[int, ...]:
        """Token ids of a conversation. Text in its content that looks like control is read as text. With the `salt` of
        its KV a long one's stretches are remembered."""
        text, spans, controls = rendered.text, rendered.spans, rendered.controls
        if spans is None and not self._rewritten.isdisjoint(controls.texts):
            spans = controls.spans(text)  # a normalizer could make control of what no rule has seen
        if salt is not None and len(text) > LONG_TEXT_CHARS:

            def read() -> tuple[int, ...]:
                stretches = self.stretches if spans is None else self._plain_for(controls).stretches
                return stretches.read(text, spans, salt)

            return await asyncio.get_running_loop().run_in_executor(self._pool, read)
        if spans is None:
            [ids] = await self.encode([text], add_special_tokens=False)
        else:
            [ids] = await self._encode_plain([text], controls, spans, add_special_tokens=False)
        return ids

    async def encode_plain(
        self, texts: Sequence[str], controls: ControlTexts, *, add_special_tokens: bool
    ) -> list[tuple[int, ...]]:
        if self._rewritten.isdisjoint(controls.texts) and not any(map(controls.spans, texts)):
            return await self.encode(texts, add_special_tokens=add_special_tokens)
        return await self._encode_plain(texts, controls, (), add_special_tokens=add_special_tokens)

    async def _encode_plain(
        self, texts: Sequence[str], controls: ControlTexts, spans: Sequence[Span], *, add_special_tokens: bool
    ) -> list[tuple[int, ...]]:
        def encode() -> list[tuple[int, ...]]:
            plain = self._plain_for(controls)
            return [plain.encode(text, spans, add_special_tokens=add_special_tokens) for text in texts]

        if controls.texts in self.plain and sum(map(len, texts)) <= LONG_TEXT_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

    def _plain_for(self, controls: ControlTexts) -> PlainTokenizer:
        if controls.texts not in self.plain:
            self.plain[controls.texts] = PlainTokenizer(self.backend, controls.texts)
        return self.plain[controls.texts]

    def read_parts(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        return self._encode([text for text, _ in parts], False)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        encodings = read_texts(self.backend, texts, add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]

    async def text_of(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) <= LONG_TEXT_TOKENS:
            return self.decode(token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._decode_long, token_ids)

    def _decode_long(self, token_ids: Sequence[int]) -> str:
        # The batch call lets go of the interpreter's lock, as in `_encode`.
        [text] = self.backend.decode_batch([list(token_ids)], skip_special_tokens=False)
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def min_tokens(self, text: str) -> int:
        """A text has at least so many tokens: a cheap bound that spares us reading megabytes only to refuse them."""
        return -(-len(text) // self._max_token_chars) if self._max_token_chars else 0

    def token_text(self, token_id: int) -> str:
        return self.vocabulary.bytes_of(token_id).decode("utf-8", "replace")


def _no_tokenizer(files: ModelFiles) -> str:
    folder = files.path
    if not folder.is_dir():
        return f"{folder} holds no tokenizer (tokenizer.ggml.tokens): give --model another GGUF file of the model"
    return (
        f"{folder} has no tokenizer.json, and neither tokenizer.model, tekken.json, nor vocab.json with merges.txt: "
        "download the tokenizer with the model's other files"
    )


def _rewrites(normalizer: Any) -> bool:
    """Whether the normalizer may turn other text into a token's text, apart from spaces and prefixes."""
    kinds = [step for step in _steps(normalizer) if step["type"] not in ("Sequence", "Prepend")]
    return any(step["type"] != "Replace" or step["pattern"].get("String") != " " for step in kinds)


def _max_token_chars(state: Mapping[str, Any], vocabulary: Vocabulary) -> int | None:
    model, steps = state["model"], list(_steps([state["normalizer"], state["pre_tokenizer"]]))
    kinds = {step["type"] for step in steps}
    drops = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]) or any(
        step.get("behavior") == "Removed" or (step["type"] == "Replace" and not _keeps_length(step)) for step in steps
    )
    whole = model["type"] == "BPE" and (model.get("byte_fallback") or "ByteLevel" in kinds)
    if drops or not whole or kinds - _KEEPS_TEXT:
        return None
    longest = max(map(len, vocabulary.token_bytes), default=1)
    return longest * (_NFC_CHARS if "NFC" in kinds else 1)


def _steps(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, list):
        for part in state:
            yield from _steps(part)
    elif isinstance(state, dict):
        yield state
        yield from _steps(state.get("normalizers", []))
        yield from _steps(state.get("decoders", []))
        yield from _steps(state.get("pretokenizers", []))


def _growth(state: Any) -> float:
    """How many times as long steps make a text at most. A regular expression may match nothing, anywhere."""
    growth = 1.0
    for step in _steps(state):
        if step["type"] == "Replace":
            old, new = step["pattern"].get("String"), len(step["content"])
            growth *= max(1.0, new / len(old)) if old else 1 + new
        elif step["type"] == "Prepend":
            growth *= 1 + len(step["prepend"])
    return growth


def _keeps_length(replace: dict[str, Any]) -> bool:
    old = replace["pattern"].get("String")
    return old is not None and len(replace["content"]) >= len(old)
