"""Token ids for spans, equal for equal seeds on every machine; words for servers that take no ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from cluster.bench.bench_load import Key, PrefixSpan

MIN_VOCAB = 1000
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city"
).split()


class Prompts:
    """Leaves out the first and last tenth of the vocabulary, where special tokens are. Uses at most `num_ids` ids."""

    def __init__(self, *, seed: int, vocab_size: int | None, num_ids: int | None = None) -> None:
        size = vocab_size or MIN_VOCAB
        self._low, self._high = size // 10, size - size // 10
        if num_ids is not None:
            self._high = min(self._high, self._low + num_ids)
        self._ids = np.arange(self._low, self._high).astype(object)  # shared by all prompts
        self._seed = seed
        self._stream = lru_cache(maxsize=4096)(self._draw)  # caches the tokens of a trace's shared blocks

    def ids(self, spans: Sequence[PrefixSpan]) -> list[int]:
        token_ids: list[int] = []
        for span in spans:
            token_ids += self._stream(span.key, span.num_tokens)
        return token_ids

    def text(self, spans: Sequence[PrefixSpan]) -> str:
        """Most tokenizers make about one token of a common word."""
        return " ".join(WORDS[token % len(WORDS)] for token in self.ids(spans))

    def _draw(self, key: Key, num_tokens: int) -> list[int]:
        # numpy guarantees that Philox's stream is stable, unlike that of default_rng.
        bits = np.random.Philox(np.random.SeedSequence((self._seed, *key)))
        places = (bits.random_raw(num_tokens) % np.uint64(self._high - self._low)).view(np.int64)
        token_ids: list[int] = self._ids.take(places).tolist()
        return token_ids
