"""Drafts from past answers of the same tenant: how answers went on that had the last tokens in them (suffix decoding,
arXiv 2411.04975).

    past answers   ... import numpy as np \\n import torch ...      ... import numpy as np \\n ...
    an answer      ... import numpy▮  ── the longest match, the more frequent way on ──▶  as np \\n

The paper counts along a tree of suffixes. A node takes 200 bytes and a token makes a node for each length, so here the
places of every three tokens are kept, 190 bytes a token, and the tree under the last tokens is read from the places
when it is needed: its depth is not bounded, and its counts are those of the latest `MAX_PLACES`.

The oldest answers go first when all together take more than `max_bytes`. An answer of one cache salt is never read for
a request of another. An ended answer is added in parts, so that no step waits for a long one. If answers end faster
than they are added, the oldest of those that wait are forgotten.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.speculation.proposer import NO_DRAFT, BaseProposer, Draft, DraftQuery, SpeculatedSequence

MIN_MATCH = 3
MAX_MATCH = 16
MAX_PLACES = 24
LONG_MATCH = 6
"""Places that match at least so many tokens count alike; if none does, those of the longest match."""
LEAST_CHANCE = 0.1
"""A draft ends before the token at which fewer of the matching answers than this share went on so."""
BYTES_A_TOKEN = 190
TOKENS_A_CALL = 256
WAITING_SHARE = 8
"""Answers that wait to be added have at most this part of the tokens that fit, or are one: there a token takes 40
bytes."""
_BITS = 21
_MASK = (1 << _BITS * MIN_MATCH) - 1
_END = -1  # after each answer
_NONE = -1


@dataclass(slots=True, eq=False)
class PastAnswers:
    """One tenant's answers, joined. Places count from the first answer ever; those below `first` have been dropped."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    before: array[int] = field(default_factory=lambda: array("q"))  # the place before with the same three tokens
    latest: dict[int, int] = field(default_factory=dict)
    first: int = 0
    key: int = 0  # of the last three tokens
    num_after_end: int = 0
    dropped_key: int = 0  # of the last three tokens that were dropped
    num_dropped: int = 0  # since the last end among those

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.tokens.append(token_id)
            if token_id == _END:
                self.num_after_end = 0
                self.before.append(_NONE)
                continue
            self.key = (self.key << _BITS | token_id) & _MASK
            self.num_after_end += 1
            if self.num_after_end < MIN_MATCH:
                self.before.append(_NONE)
                continue
            place = self.stop
            self.before.append(self.latest.get(self.key, _NONE))
            self.latest[self.key] = place

    def drop(self, num_tokens: int) -> None:
        for place, token_id in enumerate(self.tokens[:num_tokens], self.first + 1):
            if token_id == _END:
                self.num_dropped = 0
                continue
            self.num_dropped += 1
            self.dropped_key = (self.dropped_key << _BITS | token_id) & _MASK
            if self.num_dropped >= MIN_MATCH and self.latest.get(self.dropped_key) == place:
                del self.latest[self.dropped_key]
        del self.tokens[:num_tokens], self.before[:num_tokens]
        self.first += num_tokens

    def places(self, last: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (match, place) of the latest occurrences of the last tokens: the number of matching tokens, and the
        index in `tokens` of the token after them."""
        key = 0
        for token_id in last[-MIN_MATCH:]:
            key = key << _BITS | token_id
        matches: list[tuple[int, int]] = []
        place = self.latest.get(key, _NONE)
        while place > self.first and len(matches) < MAX_PLACES:
            at = place - self.first
            matches.append((self._match(at, last), at))
            place = self.before[at - 1]
        return matches

    def _match(self, at: int, last: Sequence[int]) -> int:
        depth = min(len(last), at)
        tokens = self.tokens[at - depth : at]
        for num in range(MIN_MATCH, depth):
            if tokens[-1 - num] != last[-1 - num]:
                return num
        return depth


@dataclass(frozen=True, slots=True)
class _EndedAnswer:
    salt: bytes
    token_ids: tuple[int, ...]


class SuffixProposer(BaseProposer[SpeculatedSequence]):
    """Learns each answer when it ends, unless nothing was queried for it."""

    name = "suffix"

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        super().__init__(lambda sequence: sequence)
        self._max_tokens = max_bytes // BYTES_A_TOKEN
        self._queried: set[str] = set()
        self._past: dict[bytes, PastAnswers] = {}
        self._ended: deque[_EndedAnswer] = deque()  # being added
        self.num_waiting = 0  # tokens of those
        self._added: deque[tuple[bytes, int]] = deque()  # answers, oldest first, with their lengths
        self.num_tokens = 0

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        self._add(TOKENS_A_CALL)
        return super().propose(queries)

    def end(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id)
        if request_id in self._queried:
            self._queried.discard(request_id)
            self._learn(sequence.cache_salt, tuple(sequence.output_ids))

    def _learn(self, salt: bytes, token_ids: tuple[int, ...]) -> None:
        fitting = token_ids[-(self._max_tokens - 1) :] if self._max_tokens > 1 else ()
        if len(fitting) < MIN_MATCH:
            return
        self._ended.append(_EndedAnswer(salt, (*fitting, _END)))
        self.num_waiting += len(fitting) + 1
        while self.num_waiting > self._max_tokens // WAITING_SHARE and len(self._ended) > 1:
            self.num_waiting -= len(self._ended.popleft().token_ids)

    def _add(self, num_tokens: int) -> None:
        while self._ended and num_tokens > 0:
            ended = self._ended.popleft()
            now, later = ended.token_ids[:num_tokens], ended.token_ids[num_tokens:]
            while self.num_tokens + len(now) > self._max_tokens:
                self._drop_oldest()
            self._past.setdefault(ended.salt, PastAnswers()).add(now)
            self.num_tokens += len(now)
            self._added.append((ended.salt, len(now)))
            num_tokens -= len(now)
            self.num_waiting -= len(now)
            if later:
                self._ended.appendleft(_EndedAnswer(ended.salt, later))

    def _drop_oldest(self) -> None:
        salt, num_tokens = self._added.popleft()
        past = self._past[salt]
        past.drop(num_tokens)
        self.num_tokens -= num_tokens
        if not past.tokens:
            del self._past[salt]

    def _draft(self, query: DraftQuery) -> Draft:
        sequence = self._sequences[query.request_id]
        self._queried.add(query.request_id)
        past = self._past.get(sequence.cache_salt)
        if past is None or not query.max_drafts:
            return NO_DRAFT
        last = sequence.output_ids[-MAX_MATCH:]
        if len(last) < MAX_MATCH:
            last = [*sequence.prompt_ids[len(last) - MAX_MATCH :], *last]
        matches = past.places(last) if len(last) >= MIN_MATCH else []
        if not matches:
            return NO_DRAFT
        longest = max(match for match, _ in matches)
        places = [at for match, at in matches if match >= min(longest, LONG_MATCH)]
        token_ids, agreed = _ways_on(past.tokens, places, query.max_drafts)
        if not token_ids:
            return NO_DRAFT
        return Draft(token_ids=token_ids, source=self.name, evidence=max(1, round(longest * agreed)))


def _ways_on(tokens: array[int], places: list[int], most: int) -> tuple[tuple[int, ...], float]:
    token_ids, first_share, num_places = list[int](), 0.0, len(places)
    for further in range(most):
        nexts = [tokens[at + further] if at + further < len(tokens) else _END for at in places]
        token_id, count = Counter(nexts).most_common(1)[0]  # of equals the one of the latest answer
        if token_id == _END or count / num_places < LEAST_CHANCE:
            break
        first_share = first_share or count / num_places
        token_ids.append(token_id)
        places = [at for at, following in zip(places, nexts, strict=True) if following == token_id]
    return tuple(token_ids), first_share
