"""Drafts of a smaller model with the same vocabulary. Pure: the model itself is a `DraftRunner`.

    propose    tokens that the model has not seen ── one step ──▶ draft 1 ── a step each ──▶ draft 2, 3 ...

The model computes a sequence's tokens when it is first queried for it, a chunk at most in one call, and afterwards
those that the target verified. A sequence that came from another worker, or from the host, is computed the same way:
nothing but tokens is needed. Drafts are sampled as the target samples the same position, from the same random number
(Daliri et al., arXiv 2408.07978), so that two models which agree draw the same token at every temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from protos.values import SamplingParams, SpeculationParams
from workers.batch import Batch, Row, Sample, StepOutput, is_penalised
from workers.speculation.proposer import NO_DRAFT, Draft, DraftQuery, ModelProposer, SpeculatedSequence
from workers.speculation.proposers.draft_pages import DraftPages, num_tokens, tokens_between


class DraftRunner(Protocol):
    """The draft model of a worker."""

    def draft(self, batch: Batch) -> StepOutput:
        """Computes a step of the draft model. Raises as `workers.batch.PendingStep.fetch` does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """Limits of one worker's draft model. Drafts beyond a block table use scratch pages, `scratch_pages` for each
    sequence of a step, numbered from `num_pages`."""

    block_size: int
    num_pages: int
    scratch_pages: int
    chunk: int  # known tokens that a call computes at most
    max_len: int  # positions that the model can take
    vocab_size: int  # tokens shared with the target


@dataclass(slots=True)
class _Drafting:
    """A query while its drafts are made."""

    place: int  # among the queries
    sequence: SpeculatedSequence
    sampling: SamplingParams
    num_known: int
    max_drafts: int
    table: tuple[int, ...]
    drafts: list[int] = field(default_factory=list)

    def row(self, limits: DraftLimits, start: int, token_ids: tuple[int, ...], *, samples: bool) -> Row:
        num_pages = -(-(start + len(token_ids)) // limits.block_size)
        return Row(
            request_id=self.sequence.request_id,
            token_ids=_shared(token_ids, limits.vocab_size),
            start=start,
            block_tables=(self.table[:num_pages],),
            sample=self._sample(limits.vocab_size) if samples else None,
            prompt_len=len(self.sequence.prompt_ids),
        )

    def _sample(self, vocab_size: int) -> Sample:
        sequence, penalised = self.sequence, is_penalised(self.sampling)
        return Sample(
            params=self.sampling,
            index=len(sequence.output_ids) + len(self.drafts),
            prompt_ids=_shared(sequence.prompt_ids, vocab_size) if penalised else (),
            output_ids=_shared((*sequence.output_ids, *self.drafts), vocab_size) if penalised else (),
        )


class DraftModelProposer(ModelProposer[tuple[SpeculatedSequence, SamplingParams]]):
    name = "model"

    def __init__(self, runner: DraftRunner, limits: DraftLimits, *, clock: Callable[[], float]) -> None:
        super().__init__(lambda each: (each, drafting_params(each.sampling, limits.vocab_size)), clock)
        self._runner = runner
        self._limits = limits
        self._pages = DraftPages(limits.block_size)

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        draftings = [self._drafting(place, query) for place, query in enumerate(queries)]
        firsts = [min(self._pages.num_written(drafting.sequence), drafting.num_known - 1) for drafting in draftings]
        order = sorted(range(len(draftings)), key=lambda place: draftings[place].num_known - firsts[place])
        rows: list[tuple[_Drafting, Row]] = []
        budget = self._limits.chunk
        for place in order:
            drafting, start = draftings[place], firsts[place]
            stop = min(drafting.num_known, start + budget)
            if drafting.max_drafts > 0 and stop > start:
                token_ids = tokens_between(drafting.sequence, start, stop)
                rows.append(
                    (drafting, drafting.row(self._limits, start, token_ids, samples=stop == drafting.num_known))
                )
                budget -= stop - start
        self._run(rows)
        for drafting, row in rows:
            self._pages.wrote(drafting.sequence, row.stop)
        active = [drafting for drafting, _ in rows if drafting.drafts]
        while active := [drafting for drafting in active if len(drafting.drafts) < drafting.max_drafts]:
            self._run([(drafting, self._next_row(drafting)) for drafting in active])
        for drafting, _ in rows:
            if drafting.drafts:
                self._pages.wrote(drafting.sequence, drafting.num_known, tuple(drafting.drafts[:-1]))
        return [self._made(drafting) for drafting in draftings]

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self._pages.end(request_id)

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        first_s = self._cost.seconds(2 * num_rows)  # a sequence has brought two tokens since, more or less
        return first_s + (num_drafts - 1) * self._cost.seconds(num_rows)

    def _drafting(self, place: int, query: DraftQuery) -> _Drafting:
        sequence, sampling = self._sequences[query.request_id]
        limits, num_known = self._limits, num_tokens(sequence)
        first_scratch = limits.num_pages + place * limits.scratch_pages
        scratch = range(first_scratch, first_scratch + limits.scratch_pages)
        return _Drafting(
            place=place,
            sequence=sequence,
            sampling=sampling,
            num_known=num_known,
            max_drafts=min(query.max_drafts, limits.max_len - num_known + 1),
            table=(*self._pages.table(sequence), *scratch),
        )

    def _next_row(self, drafting: _Drafting) -> Row:
        return drafting.row(
            self._limits, drafting.num_known + len(drafting.drafts) - 1, (drafting.drafts[-1],), samples=True
        )

    def _run(self, rows: Sequence[tuple[_Drafting, Row]]) -> None:
        if not rows:
            return
        batch = Batch(rows=tuple([row for _, row in rows]))
        start_s = self._clock()
        output = self._runner.draft(batch)
        elapsed_s = self._clock() - start_s
        self._cost.observe(batch.num_tokens, elapsed_s)
        self._spent_s += elapsed_s
        for (drafting, _), out in zip(rows, output.rows, strict=True):
            if out.token_ids and out.token_ids[0] < self._limits.vocab_size:
                drafting.drafts.append(out.token_ids[0])
            else:
                drafting.max_drafts = len(drafting.drafts)

    def _made(self, drafting: _Drafting) -> Draft:
        return Draft(token_ids=tuple(drafting.drafts), source=self.name) if drafting.drafts else NO_DRAFT


def _shared(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Replaces tokens outside the draft model's vocabulary by its first token: the target's vocabulary may be padded
    further."""
    if not token_ids or max(token_ids) < vocab_size:
        return token_ids
    return tuple([token_id if token_id < vocab_size else 0 for token_id in token_ids])


def drafting_params(
    sampling: SamplingParams, vocab_size: int | None = None, *, penalised: bool = True
) -> SamplingParams:
    """Sampling parameters of drafts: those of the answer without a grammar, whose masks cut drafts later, and without
    biases of tokens from `vocab_size` on. Without `penalised` no tokens are counted."""
    drafting = replace(
        sampling,
        grammar="",
        logprobs=None,
        prompt_logprobs=None,
        logit_bias=tuple([pair for pair in sampling.logit_bias if vocab_size is None or pair[0] < vocab_size]),
        speculation=SpeculationParams(),
        pooling="",
    )
    if penalised:
        return drafting
    return replace(drafting, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
