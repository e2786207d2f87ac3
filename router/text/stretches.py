"""Remembers the token ids of stretches of prompts, so that a conversation's next turn reads its new text only.

    <|user|>How do ...   <|assistant|>You ...   <|user|>And ...
    └─── stretch ────┘   └──── stretch ─────┘   └── stretch ──┘

A tokenizer of the `tokenizers` library first finds the added tokens that are not normalised, and then normalises and
splits what lies between, each part by itself (its `AddedVocabulary`). So a prompt's ids are those of its stretches if
each one but the first begins with such a token, which takes no white space before it (`lstrip`), and no token asks what
stands beside it (`single_word`). This is tried between awkward neighbours before anything is remembered, and on one
prompt of `CHECK_EVERY` in service; a difference ends the memory.

Stretches are kept apart by the salt of a tenant's KV: otherwise the time to the first token would tell a tenant which
texts others have sent.
"""

from __future__ import annotations

import logging
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from itertools import chain, pairwise, product

import tokenizers

from protos.errors import InvalidRequest
from router.text.control import Span, any_of

log = logging.getLogger("baton.router")

MAX_BYTES = 64 * 2**20
"""About fifty conversations of 150,000 tokens."""
ENTRY_BYTES = 200
"""An entry's share of the bound beside its ids: key, objects, and links."""
CHECK_EVERY = 1000
_NEIGHBOURS = ("", " ", "  ", "\n", "\n\n", "a", "7", " a", "a ", "'s", "é", "e\u0301", "\u0301", "\u4f60")
MAX_TRIED = 8
"""Control tokens that are tried, of hundreds that are alike."""

Part = tuple[str, tuple[Span, ...]]
"""A text and the spans of it that are control tokens."""
Reader = Callable[[Sequence[Part]], Sequence[Sequence[int]]]


class Stretches:
    """Remembers the ids of parts for one reader. Thread-safe. `num_read` and `num_remembered` count tokens, `num_bytes`
    the memory."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        reader: Reader,
        *,
        controls: Collection[str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`controls`: the texts of spans, if the reader needs these."""
        added = backend.get_added_tokens_decoder().values()
        raw = [token for token in added if not token.normalized]
        self._cuts = {token.content for token in raw if not (token.lstrip or _has_space(token.content))}
        if controls is not None:
            self._cuts.intersection_update(controls)
        if any(token.single_word for token in added):
            self._cuts.clear()
        self._raw = [token.content for token in raw]
        self._reader, self._max_bytes = reader, max_bytes
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = self._num_prompts = 0
        self._lock = threading.Lock()
        self.has_differed = False
        self.num_read = self.num_remembered = 0

    def read(self, text: str, spans: Sequence[Span] | None, salt: bytes) -> tuple[int, ...]:
        """Token ids of a prompt. Without `spans` every added token in it is a control token."""
        if self.has_differed or not self._is_exact:
            return self._whole(text, spans)
        parts = self._parts(text, spans)
        root = blake2b(salt, digest_size=32).digest()
        keys = [blake2b(f"{inner}{part}".encode(), digest_size=16, key=root).digest() for part, inner in parts]
        with self._lock:
            remembered = {key: self._find(key) for key in keys}
            missing = {key: part for key, part in zip(keys, parts, strict=True) if remembered[key] is None}
            self._num_prompts += 1
            is_checked = self._num_prompts % CHECK_EVERY == 0
        read = dict(zip(missing, map(_packed, self._reader([*missing.values()])), strict=True))
        ids = tuple(array("I", b"".join(read.get(key) or remembered[key] or b"" for key in keys)))
        with self._lock:
            for key, packed in read.items():
                self._keep(key, packed)
            num_read = sum(map(len, read.values())) // 4
            self.num_read += num_read
            self.num_remembered += len(ids) - num_read
        if is_checked and (whole := self._whole(text, spans)) != ids:
            log.error("stretches of a prompt have other ids than the prompt: prompts are read whole from now on")
            self.has_differed = True
            return whole
        return ids

    def _whole(self, text: str, spans: Sequence[Span] | None) -> tuple[int, ...]:
        return tuple(self._reader([(text, tuple(spans or ()))])[0])

    def _parts(self, text: str, spans: Sequence[Span] | None) -> list[Part]:
        """Each part's spans count from its beginning."""
        written = [match.span() for match in self._pattern.finditer(text)] if spans is None else spans
        bounds = [0, *(start for start, end in written if start and text[start:end] in self._cuts), len(text)]
        inside: list[list[Span]] = [[] for _ in bounds[1:]]
        number = 0
        for start, end in spans or ():
            while start >= bounds[number + 1]:
                number += 1
            inside[number].append((start - bounds[number], end - bounds[number]))
        return [(text[start:end], tuple(each)) for (start, end), each in zip(pairwise(bounds), inside, strict=True)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(any_of(self._raw) if self._raw else "(?!)")

    def _find(self, key: bytes) -> bytes | None:
        if key in self._ids:
            self._ids.move_to_end(key)
        return self._ids.get(key)

    def _keep(self, key: bytes, ids: bytes) -> None:
        if key not in self._ids:
            self.num_bytes += ENTRY_BYTES + len(ids)
        self._ids[key] = ids
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= ENTRY_BYTES + len(self._ids.popitem(last=False)[1])

    @cached_property
    def _is_exact(self) -> bool:
        tried = sorted(self._cuts)[:: len(self._cuts) // MAX_TRIED + 1]
        if not tried:
            log.info("prompts are read whole each time: this tokenizer has no token that stands for itself alone")
            return False
        pieces, spans, size = list[str](), list[Span](), 0
        for control, before, after in product(tried, _NEIGHBOURS, _NEIGHBOURS):
            pieces += before, control, after
            spans.append((size + len(before), size + len(before) + len(control)))
            size += len(before) + len(control) + len(after)
        text = "".join(pieces)
        parts = self._parts(text, spans)
        with suppress(InvalidRequest):  # the library gives up over these neighbours, not over every prompt
            if tuple(chain.from_iterable(self._reader(parts))) == self._whole(text, spans):
                return True
        log.warning("prompts are read whole each time: parts of a text have other ids than the text")
        return False


def _has_space(text: str) -> bool:
    return text.strip() != text or not text


def _packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()
