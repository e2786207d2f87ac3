"""A proposer that knows each answer, and is right with a given probability: it measures the mechanism alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from workers.speculation.proposer import NO_DRAFT, ComputedRow, Draft, DraftQuery, ProposerNeeds, SpeculatedSequence


class KnownAnswers:
    """`answers` has the answer of each request. A token of a draft is the answer's with the probability `right`, and
    another one of the vocabulary otherwise."""

    name = "known"
    needs = ProposerNeeds()

    def __init__(self, answers: Mapping[str, Sequence[int]], *, right: float, vocab_size: int, seed: int = 0) -> None:
        self._answers = answers
        self._right = right
        self._vocab_size = vocab_size
        self._chance = Random(seed)
        self._sequences: dict[str, SpeculatedSequence] = {}

    def begin(self, sequence: SpeculatedSequence) -> None:
        self._sequences[sequence.request_id] = sequence

    def computed(self, rows: Sequence[ComputedRow]) -> None: ...

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        return [self._draft(query) for query in queries]

    def end(self, request_id: str) -> None:
        del self._sequences[request_id]

    def __len__(self) -> int:
        return len(self._sequences)

    def _draft(self, query: DraftQuery) -> Draft:
        num_known = len(self._sequences[query.request_id].output_ids)
        coming = self._answers[query.request_id][num_known : num_known + query.max_drafts]
        token_ids = tuple([one if self._chance.random() < self._right else self._other(one) for one in coming])
        return Draft(token_ids=token_ids, source=self.name) if token_ids else NO_DRAFT

    def _other(self, token_id: int) -> int:
        return (token_id + 1 + self._chance.randrange(self._vocab_size - 1)) % self._vocab_size
