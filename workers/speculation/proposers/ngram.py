"""Drafts from the sequence itself: what followed the last tokens where they occurred before (prompt lookup decoding,
https://github.com/apoorvumang/prompt-lookup-decoding).

    prompt + answer   ... the cat sat on the mat ........ the cat sat on ▮
                              └── match ──┘ the mat ◀── draft   └ match ┘

The longest match wins, of equally long ones the latest. A match that overlaps the end repeats its period: "abcabcab"
continues "cabcab...". Matches of one or two tokens count where there is no longer one: whether their drafts are worth a
position, their acceptance tells (`Draft.evidence`).

The index finds the places of the last `KEY` tokens. That of the prompt is sorted once, 20 bytes a token; that of the
answer grows by three entries a token. All but the sorting is plain Python: numpy's calls for a few numbers take longer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from workers.speculation.proposer import NO_DRAFT, BaseProposer, Draft, DraftQuery, SpeculatedSequence

KEY = 3
"""Tokens of a key: longer matches are among the places of the last three tokens."""
MAX_MATCH = 16
"""Longer matches count as this long."""
MAX_CANDIDATES = 64
"""The latest places of the last tokens in the prompt, and in the answer, that are compared."""
_BITS = 21
"""Bits of a token in a key of three: vocabularies have less than two million."""
_PAIR = 1 << 2 * _BITS
"""Tells a key of two tokens from one of one."""


class MatchIndex:
    """The places of every one, two and three tokens in a row, of one growing sequence. A place is the number of tokens
    before it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = list(token_ids)
        keys_T = _keys(np.array(token_ids, dtype=np.int64))
        order_T = np.argsort(keys_T, kind="stable")
        self._sorted = array("q", keys_T[order_T].tobytes())
        self._order_T = order_T.astype(np.int32)
        self._latest: dict[int, int] = {}  # by a key that ends in the answer: the place after it
        self._before: dict[int, int] = {}  # the place of the same key before
        self._short: dict[int, tuple[int, int]] = {}  # by one or two tokens of the answer: the latest places after them
        for place in range(max(1, len(token_ids) - KEY + 2), len(token_ids) + 1):  # no key begins so late
            self._add_short(place)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        latest, first = self._latest, len(self._tokens)
        self._tokens += token_ids
        for place in range(first + 1, len(self._tokens) + 1):
            self._add_short(place)
            if place >= KEY:
                key = self._key(place)
                if key in latest:
                    self._before[place] = latest[key]
                latest[key] = place

    def longest_match(self) -> tuple[int, int]:
        """The place after the longest earlier occurrence of the last tokens, and its length; (0, 0) if the last token
        has not occurred before."""
        place, length = self._long_match() if len(self._tokens) > KEY else (0, 0)
        return (place, length) if length else self._short_match()

    def after(self, place: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `place` on; at the end of the known tokens they repeat from `place`."""
        after = self._tokens[place : place + count]
        period = len(after)
        return tuple(after) if period == count else tuple([after[at % period] for at in range(count)])

    def _add_short(self, place: int) -> None:
        tokens, short = self._tokens, self._short
        each = tokens[place - 1]
        short[each] = (place, short[each][0] if each in short else 0)
        if place > 1:
            two = _PAIR | tokens[place - 2] << _BITS | each
            short[two] = (place, short[two][0] if two in short else 0)

    def _long_match(self) -> tuple[int, int]:
        """Finds the longest match of at least `KEY` tokens; the answer comes before the prompt, later places before
        earlier ones. A place is compared only if it matches where the best one so far does not."""
        tokens = self._tokens
        stop, best, best_place = len(tokens), 0, 0
        for place in chain(self._in_answer(stop), self._in_prompt(stop)):
            if place > best and tokens[place - 1 - best] == tokens[stop - 1 - best]:
                length = self._match_length(place, stop)
                if length > best:
                    best, best_place = length, place
                    if best == MAX_MATCH:
                        break
        return best_place, best

    def _short_match(self) -> tuple[int, int]:
        """Finds a shorter match: the latest place in the answer, else in the prompt."""
        tokens, stop = self._tokens, len(self._tokens)
        for length in range(min(KEY, stop) - 1, 0, -1):
            key = tokens[-1] if length == 1 else tokens[-2] << _BITS | tokens[-1]
            latest, before = self._short.get(key if length == 1 else _PAIR | key, (0, 0))
            if place := before if latest == stop else latest:  # the former: the last tokens themselves
                return place, length
            unit = 1 << _BITS * (KEY - length)
            low = bisect_left(self._sorted, key * unit)
            high = bisect_left(self._sorted, (key + 1) * unit, low)
            if low < high and (place := int(self._order_T[low:high].max()) + length) < stop:
                return place, length
        return 0, 0

    def _in_answer(self, stop: int) -> Iterator[int]:
        place = self._latest.get(self._key(stop))
        if place == stop:  # the last tokens themselves, once they are indexed
            place = self._before.get(place)
        for _ in range(MAX_CANDIDATES):
            if place is None:
                return
            yield place
            place = self._before.get(place)

    def _in_prompt(self, stop: int) -> Iterator[int]:
        key = self._key(stop)
        low = bisect_left(self._sorted, key)
        high = bisect_left(self._sorted, key + 1, low)
        for first in reversed(self._order_T[max(low, high - MAX_CANDIDATES) : high].tolist()):
            if first + KEY < stop:
                yield first + KEY

    def _match_length(self, place: int, stop: int) -> int:
        tokens, most = self._tokens, min(MAX_MATCH, place)
        for length in range(most):
            if tokens[place - 1 - length] != tokens[stop - 1 - length]:
                return length
        return most

    def _key(self, stop: int) -> int:
        first, second, third = self._tokens[stop - KEY : stop]
        return (first << _BITS | second) << _BITS | third


class NgramProposer(BaseProposer[SpeculatedSequence]):
    """Matches the end of each sequence in its own prompt and answer."""

    name = "ngram"

    def __init__(self) -> None:
        super().__init__(lambda sequence: sequence)
        self._indexes: dict[str, MatchIndex] = {}  # made by the first query

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self._indexes.pop(request_id, None)

    def _draft(self, query: DraftQuery) -> Draft:
        sequence = self._sequences[query.request_id]
        num_prompt = len(sequence.prompt_ids)
        index = self._indexes.get(query.request_id)
        if index is None:
            index = self._indexes[query.request_id] = MatchIndex(sequence.prompt_ids)
        if len(index) < num_prompt + len(sequence.output_ids):
            index.extend(sequence.output_ids[len(index) - num_prompt :])
        place, length = index.longest_match()
        if not length or not query.max_drafts:
            return NO_DRAFT
        return Draft(token_ids=index.after(place, query.max_drafts), source=self.name, evidence=length)


def _keys(tokens_T: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(tokens_T) < KEY:
        return np.zeros(0, dtype=np.int64)
    keys_T: NDArray[np.int64] = (tokens_T[:-2] << _BITS | tokens_T[1:-1]) << _BITS | tokens_T[2:]
    return keys_T
