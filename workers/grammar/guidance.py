"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): Lark with JSON Schemas in it (`%json`).

    submit ── prepare ──▶ compiled, on a thread ──▶ matcher of the request, at the end of its output ──▶ allowed

Matchers are kept where they stand, and compiled grammars for whoever comes with the same one, so that a step costs one
token of parsing. Both are caches: what was dropped is made again from grammar and output, and says the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protos.errors import InvalidRequest
from protos.threads import DeepThread
from workers.engine.batch import Sample
from workers.grammar.base import Mask, without

log = logging.getLogger(__name__)

MAX_COMPILED = 64
MAX_MATCHERS = 1024
_SAYS_NO_STATE = LLParserLimits(verbose_errors=False)


@dataclass(slots=True, eq=False)
class _Standing:
    """A matcher that has seen these tokens."""

    grammar: str
    matcher: LLMatcher
    output_ids: tuple[int, ...] = ()


class GuidanceGrammars:
    """Reads `tokenizer.json` for what its tokens say. `vocab_size` is the model's: tokens that the tokenizer does not
    know are never allowed. `eos_ids` end an answer whose grammar is fulfilled."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._standing: OrderedDict[str, _Standing] = OrderedDict()
        self._thread = DeepThread("grammars")
        self._tokenizer: Future[LLTokenizer] | None = None
        if tokenizer.is_file() and self._eos_ids:
            self._tokenizer = self._thread.submit(self._read)

    def prepare(self, grammar: str) -> None:
        if not self._eos_ids:
            raise InvalidRequest("this model has no end-of-sequence token: its answers cannot be constrained")
        if self._tokenizer is None:
            raise InvalidRequest(f"{self._path} is missing: this worker cannot constrain answers", param="grammar")
        self._compile(grammar)

    def allowed(self, request_id: str, sample: Sample) -> Mask:
        standing = self._standing.pop(request_id, None)
        grammar, output_ids = sample.params.grammar, sample.output_ids
        if (
            standing is None
            or standing.grammar != grammar
            or output_ids[: len(standing.output_ids)] != (standing.output_ids)
        ):
            standing = _Standing(grammar=grammar, matcher=self._compile(grammar).result().deep_copy())
        matcher = standing.matcher
        matcher.consume_tokens(list(output_ids[len(standing.output_ids) :]))
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32) if not matcher.is_error() else None
        if mask is None or matcher.is_error() or not mask.any():
            raise InvalidRequest(f"the answer cannot follow its grammar: {matcher.get_error()}", param="grammar")
        standing.output_ids = output_ids
        self._standing[request_id] = standing
        if len(self._standing) > MAX_MATCHERS:
            self._standing.popitem(last=False)
        return without(mask, sample.banned_ids)

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        """The grammar's matcher at its beginning; to be copied."""
        found = self._compiled.pop(grammar, None) or self._thread.submit(self._matcher, grammar)
        self._compiled[grammar] = found
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found

    def _matcher(self, grammar: str) -> LLMatcher:
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=_SAYS_NO_STATE)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be compiled: {matcher.get_error()}", param="grammar")
        return matcher

    def _read(self) -> LLTokenizer:
        try:
            content = self._path.read_text(encoding="utf-8")
            return LLTokenizer(content, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (OSError, ValueError) as error:
            log.warning("answers cannot be constrained: %s: %s", self._path, error)
            raise InvalidRequest(f"this worker cannot constrain answers: {error}", param="grammar") from error
