"""Drafts of a head with attention: EAGLE, EAGLE-3, multi-token prediction. Pure: the head itself is a `HeadRunner`.

    position of the target     p - 1        p        p + 1
    entry of the head                     h_p, token p + 1  ──▶  draft of token p + 2  ──▶  h', draft  ──▶  ...
    its KV stands in the page of p

Every step's verified positions become entries at once, since hidden states last until the next step; the entry of the
last one brings the first draft. Further drafts continue the head's own features, which last until the next step's
entries: a sequence that sat out a step, as one that waits for its mask, has its first draft alone.

Entries are made of every row, also of requests that do not speculate or end with the step, so that each page with KV of
the model has the head's. A prefix hit takes them over, and they move to other workers and to the host with the model's
(`protos.values.KVHead`). The last entry of a block was made with the next token of the sequence that wrote it, which
costs a little acceptance and no recomputation. Blocks that came from a worker without this head have none, and they
cannot be made without the target's hidden states: the head begins at the next block, and sees what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.values import SamplingParams
from workers.batch import Batch, Row, Sample, StepOutput
from workers.speculation.proposer import (
    NO_DRAFT,
    ComputedRow,
    Draft,
    DraftQuery,
    ModelProposer,
    ProposerNeeds,
    SpeculatedSequence,
)
from workers.speculation.proposers.draft_model_proposer import DraftLimits, drafting_params
from workers.speculation.proposers.draft_pages import num_tokens


class HeadRunner(Protocol):
    """The head of a worker. A row's token is the one after the position; a row that samples brings a draft."""

    def head_computed(self, batch: Batch, first_hidden: tuple[int, ...]) -> StepOutput:
        """Makes the entries of positions that the target's last step computed, each row's from `first_hidden` on."""
        ...

    def head_next(self, batch: Batch) -> StepOutput:
        """Makes the entry that follows each sampling row."""
        ...


@dataclass(slots=True)
class _Headed:
    """A sequence, with the draft after its `num_known` tokens."""

    sequence: SpeculatedSequence
    sampling: SamplingParams
    num_known: int = 0
    draft_id: int = 0
    first: int = 0  # position from which it has entries


class HeadProposer(ModelProposer[_Headed]):
    """`headless`: pages whose KV is without that of the head (`BlockPool.headless`)."""

    needs = ProposerNeeds(every_step=True, every_row=True)

    def __init__(
        self,
        name: str,
        runner: HeadRunner,
        limits: DraftLimits,
        *,
        clock: Callable[[], float],
        headless: set[int] | None = None,
    ) -> None:
        super().__init__(lambda each: _Headed(each, drafting_params(each.sampling, penalised=False)), clock)
        self.name = name
        self._runner = runner
        self._limits = limits
        self._headless = headless if headless is not None else set()
        self._continued: frozenset[str] = frozenset()  # sequences whose features the runner has

    def computed(self, rows: Sequence[ComputedRow]) -> None:
        start_s = self._clock()
        made: list[Row] = []
        first_hidden: list[int] = []
        for row in rows:
            first = self._first_entry(row)
            start, stop = max(row.start, first), min(row.start + len(row.token_ids), self._limits.max_len)
            if stop <= start:
                continue
            after = (*row.token_ids, row.next_id)[start - row.start + 1 : stop - row.start + 1]
            headed = self._sequences.get(row.request_id) if row.goes_on else None
            if headed is not None:
                headed.first = first
            drafts = headed is not None and stop == num_tokens(headed.sequence) - 1
            made.append(
                self._row(
                    row.request_id, start, after, pages=row.pages, first=first, prompt_len=row.prompt_len,
                    sample=self._sample(headed) if headed is not None and drafts else None,
                )
            )  # fmt: skip
            first_hidden.append(row.first_hidden + start - row.start)
        if made:
            output = self._runner.head_computed(Batch(rows=tuple(made)), tuple(first_hidden))
            self._continued = frozenset([row.request_id for row in made if row.sample is not None])
            for row_made, out in zip(made, output.rows, strict=True):
                if out.token_ids:
                    headed = self._sequences[row_made.request_id]
                    headed.num_known, (headed.draft_id,) = num_tokens(headed.sequence), out.token_ids
        self._spent_s += self._clock() - start_s

    def skipped(self, rows: Sequence[ComputedRow]) -> None:
        """Marks that the head begins after these pages: their entries cannot be made later."""
        size = self._limits.block_size
        for row in rows:
            self._headless.update(row.pages[row.start // size : -(-(row.start + len(row.token_ids)) // size)])
        self._continued = frozenset()

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        start_s = self._clock()
        drafts = self._propose(queries)
        self._spent_s += self._clock() - start_s
        return drafts

    def _propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        drafts: dict[str, list[int]] = {}
        for query in queries:
            headed = self._sequences[query.request_id]
            if query.max_drafts > 0 and headed.num_known == num_tokens(headed.sequence):
                drafts[query.request_id] = [headed.draft_id]
                headed.num_known = 0  # a continued sequence's features are gone
        max_drafts = {query.request_id: query.max_drafts for query in queries}
        active = [name for name in drafts if name in self._continued]
        self._continued = frozenset()
        while active := [name for name in active if len(drafts[name]) < self._max_drafts(name, max_drafts[name])]:
            rows = [self._next_row(place, name, drafts[name]) for place, name in enumerate(active)]
            start_s = self._clock()
            output = self._runner.head_next(Batch(rows=tuple(rows)))
            self._cost.observe(len(rows), self._clock() - start_s)
            for name, out in zip(active, output.rows, strict=True):
                drafts[name] += out.token_ids
            active = [name for name, out in zip(active, output.rows, strict=True) if out.token_ids]
        return [
            Draft(token_ids=tuple(drafts[query.request_id]), source=self.name)
            if query.request_id in drafts
            else NO_DRAFT
            for query in queries
        ]

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """The first draft came with the entries, which are made in any case."""
        return (num_drafts - 1) * self._cost.seconds(num_rows)

    def _max_drafts(self, request_id: str, max_drafts: int) -> int:
        return min(max_drafts, self._limits.max_len - num_tokens(self._sequences[request_id].sequence) + 2)

    def _first_entry(self, row: ComputedRow) -> int:
        """The first position of the row's sequence with an entry, now or after this step: it follows the last page
        without entries."""
        if not self._headless:
            return 0
        size = self._limits.block_size
        before = row.pages[: -(-row.start // size)]
        return size * max((place + 1 for place, page in enumerate(before) if page in self._headless), default=0)

    def _next_row(self, place: int, request_id: str, drafts: Sequence[int]) -> Row:
        headed, limits = self._sequences[request_id], self._limits
        first_scratch = limits.num_pages + place * limits.scratch_pages
        return self._row(
            request_id,
            num_tokens(headed.sequence) - 2 + len(drafts),
            (drafts[-1],),
            pages=(*headed.sequence.tables[0], *range(first_scratch, first_scratch + limits.scratch_pages)),
            first=headed.first,
            prompt_len=len(headed.sequence.prompt_ids),
            sample=self._sample(headed, len(drafts)),
        )

    def _sample(self, headed: _Headed, num_drafts: int = 0) -> Sample:
        return Sample(params=headed.sampling, index=len(headed.sequence.output_ids) + num_drafts)

    def _row(
        self,
        request_id: str,
        start: int,
        token_ids: tuple[int, ...],
        *,
        pages: tuple[int, ...],
        first: int,
        prompt_len: int,
        sample: Sample | None,
    ) -> Row:
        """Entries of positions from `start` on, counted from the head's first entry: a shift of all positions leaves
        attention unchanged."""
        size = self._limits.block_size
        table = pages[first // size :]
        return Row(
            request_id=request_id,
            token_ids=token_ids,
            start=start - first,
            block_tables=(table[: -(-(start - first + len(token_ids)) // size)],),
            sample=sample,
            prompt_len=prompt_len,
        )
