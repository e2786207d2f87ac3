"""Drafts of Medusa heads. Pure: the heads themselves are a `MedusaRunner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.values import SamplingParams
from workers.batch import Sample
from workers.speculation.proposer import (
    NO_DRAFT,
    ComputedRow,
    Draft,
    DraftQuery,
    ModelProposer,
    ProposerNeeds,
    SpeculatedSequence,
)
from workers.speculation.proposers.draft_model_proposer import drafting_params
from workers.speculation.proposers.draft_pages import num_tokens


class MedusaRunner(Protocol):
    """The heads of a worker."""

    def medusa(self, places: tuple[int, ...], samples: tuple[tuple[Sample, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """For each head and its `samples`, a token for the hidden state at each place of the last step."""
        ...


@dataclass(slots=True)
class _Placed:
    """A sequence, with the place of the hidden state before its last of `num_known` tokens."""

    sequence: SpeculatedSequence
    sampling: SamplingParams
    num_known: int = 0
    place: int = 0


class MedusaProposer(ModelProposer[_Placed]):
    name = "medusa"
    needs = ProposerNeeds(every_step=True)

    def __init__(self, runner: MedusaRunner, num_heads: int, *, clock: Callable[[], float]) -> None:
        super().__init__(lambda each: _Placed(each, drafting_params(each.sampling, penalised=False)), clock)
        self._runner = runner
        self._num_heads = num_heads
        self._step: set[str] = set()  # sequences of the last step

    def computed(self, rows: Sequence[ComputedRow]) -> None:
        self._step = set()
        for row in rows:
            placed, stop = self._sequences[row.request_id], row.start + len(row.token_ids)
            if stop == num_tokens(placed.sequence) - 1:
                placed.num_known, placed.place = stop + 1, row.first_hidden + len(row.token_ids) - 1
                self._step.add(row.request_id)

    def skipped(self, rows: Sequence[ComputedRow]) -> None:
        self._step = set()

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        current = [query for query in queries if query.request_id in self._step and self._is_current(query)]
        if not current:
            return [NO_DRAFT] * len(queries)
        depth = min(self._num_heads, max(query.max_drafts for query in current))
        sequences = [self._sequences[query.request_id] for query in current]
        samples = tuple([tuple([_sample(placed, head) for placed in sequences]) for head in range(depth)])
        start_s = self._clock()
        drawn = self._runner.medusa(tuple([placed.place for placed in sequences]), samples)
        elapsed_s = self._clock() - start_s
        self._cost.observe(len(sequences) * depth, elapsed_s)
        self._spent_s += elapsed_s
        drafts = {
            query.request_id: _leading([ids[place] for ids in drawn[: query.max_drafts]])
            for place, query in enumerate(current)
        }
        return [
            Draft(token_ids=drafts[query.request_id], source=self.name) if drafts.get(query.request_id) else NO_DRAFT
            for query in queries
        ]

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self._step.discard(request_id)

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return self._cost.seconds(num_rows * min(num_drafts, self._num_heads))

    def _is_current(self, query: DraftQuery) -> bool:
        placed = self._sequences[query.request_id]
        return query.max_drafts > 0 and placed.num_known == num_tokens(placed.sequence)


def _sample(placed: _Placed, head: int) -> Sample:
    return Sample(params=placed.sampling, index=len(placed.sequence.output_ids) + head)


def _leading(ids: Sequence[int]) -> tuple[int, ...]:
    stop = next((place for place, token_id in enumerate(ids) if token_id < 0), len(ids))
    return tuple(ids[:stop])
