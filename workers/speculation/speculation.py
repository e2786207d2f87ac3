"""Speculation of one engine: queries its proposers, chooses how much of their drafts a step verifies, and learns.

    plan    drafts  ── queries ──▶ proposers ── drafts ──▶ choose_lengths ◀── rates of acceptance, seconds of a step
    apply   applied ── what was accepted ──▶ rates, counts          fetch   observe ── seconds ──▶ StepSeconds, Payoff

Pure: no torch, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from protos.codec import Value
from protos.values import DraftCounts, PausedProposer, SpeculationLoad, SpeculationParams
from workers.batch import Batch
from workers.speculation.acceptance import Acceptance
from workers.speculation.cost import StepSeconds
from workers.speculation.lengths import choose_depth, choose_lengths, may_pay
from workers.speculation.payoff import Payoff
from workers.speculation.proposer import (
    NO_DRAFT,
    ComputedRow,
    Draft,
    DraftQuery,
    Proposer,
    SpeculatedSequence,
    TimedProposer,
)
from workers.speculation.proposers.prediction import PredictionProposer

log = logging.getLogger("baton.worker")

RECENT = 0.02
"""Weight of the latest row in the mean of tokens that a row brings."""
PROBE_CALLS = 64
"""Where drafts of a proposer that takes time do not pay, one sequence gets one in so many calls: rates may have changed
since."""

UNCHOSEN = ((16, 2), (64, 4))
"""A sequence of which no draft was chosen in so many steps is queried in one of so many: proposers take time, too."""


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start. Rows are those of sequences that may speculate, with drafts and without. `spared_s` and
    `spent_s` as in `SpeculationLoad`."""

    num_rows: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    spared_s: float = 0.0
    spent_s: float = 0.0
    sources: dict[str, SourceCounts] = field(default_factory=dict)


@dataclass(slots=True)
class SourceCounts:
    """Drafts of one source by their position, from the first on."""

    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.drafted_at += [0] * (num_drafted - len(self.drafted_at))
        self.accepted_at += [0] * (num_drafted - len(self.accepted_at))
        for place in range(num_drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < num_accepted


class SequenceCounts(Value, frozen=True, kw_only=True):
    """A sequence's verified and accepted drafts, and those of the client's prediction that were accepted and
    rejected."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_predicted: int = 0
    num_mispredicted: int = 0


NO_COUNTS = SequenceCounts()


@dataclass(slots=True)
class _Speculating:
    """A sequence that may speculate, with the draft of its row in flight."""

    proposers: Sequence[Proposer]
    max_drafts: int
    num_unchosen: int = 0  # steps since a draft of it was chosen
    draft: Draft = NO_DRAFT
    counts: SequenceCounts = NO_COUNTS  # since they were last taken


class Speculation:
    """`proposers` are queried in their order; of equally promising drafts the first counts. `max_drafts` bounds the
    drafts of a row."""

    def __init__(self, proposers: Sequence[Proposer], *, max_drafts: int, cost: StepSeconds | None = None) -> None:
        self._proposers: Sequence[Proposer] = ()
        self._timed: dict[str, TimedProposer] = {}  # by their names
        self._payoffs: dict[str, Payoff] = {}  # of those
        self._paused: tuple[PausedProposer, ...] = ()
        self._taken_s: dict[str, float] = {}  # by proposers since the last step
        self._is_counted = self._is_after_prompt = (
            False  # of the present step, for payoffs; whether the last step had a prompt
        )
        self._recent_tokens = 1.0
        self._sequences: dict[str, _Speculating] = {}
        self._num_unpaid = 0  # calls since a timed proposer was queried
        self._draft_loads: tuple[DraftCounts, ...] | None = None
        self._spared_by_accepted_s = 0.0
        self.max_drafts = max_drafts
        self.acceptance = Acceptance()
        self.cost = cost or StepSeconds()
        self.counts = SpeculationCounts()
        for proposer in proposers:
            self.add(proposer)

    def add(self, proposer: Proposer) -> None:
        self._proposers = (*self._proposers, proposer)
        if isinstance(proposer, TimedProposer):  # which takes as long as a row: never in a step
            self._timed[proposer.name], self._payoffs[proposer.name] = proposer, Payoff()

    @property
    def reads_steps(self) -> bool:
        return any(proposer.needs.every_step for proposer in self._proposers)

    def computed(self, rows: Sequence[ComputedRow]) -> None:
        """Passes the rows of an applied step to proposers that need every step. A proposer that does not need every row
        gets those of its running requests; a paused one computes nothing."""
        for proposer in self._proposers:
            if self._is_paused(proposer.name):
                self._timed[proposer.name].skipped(rows)
            elif proposer.needs.every_row:
                proposer.computed(rows)
            elif proposer.needs.every_step:
                own = [row for row in rows if row.goes_on and proposer in self._proposers_of(row.request_id)]
                proposer.computed(own)

    def _proposers_of(self, request_id: str) -> Sequence[Proposer]:
        sequence = self._sequences.get(request_id)
        return sequence.proposers if sequence is not None else ()

    def limit(self, max_drafts: int) -> None:
        """The runner verifies so many drafts of a row at most."""
        self.max_drafts = min(self.max_drafts, max_drafts)

    def begin(self, sequence: SpeculatedSequence, params: SpeculationParams) -> None:
        """Begins a request, which does not speculate if none of its sources exists here."""
        if params.mode == "off":
            return
        proposers = [
            proposer
            for proposer in self._proposers
            if (proposer.name != PredictionProposer.name or sequence.prediction_ids)
            and (not params.sources or proposer.name in params.sources)
        ]
        if not proposers:
            return
        for proposer in proposers:
            proposer.begin(sequence)
        max_drafts = min(params.max_drafts or self.max_drafts, self.max_drafts)
        self._sequences[sequence.request_id] = _Speculating(proposers, max_drafts)

    def end(self, request_id: str) -> None:
        ended = self._sequences.pop(request_id, None)
        if ended is not None:
            for proposer in ended.proposers:
                proposer.end(request_id)
            self.acceptance.end(request_id)

    def drafts(
        self, limits: Sequence[tuple[str, int]], *, num_rows: int, num_positions: int, budget: int
    ) -> dict[str, tuple[int, ...]]:
        """Drafts to verify in the next step: of each (request id, limit) at most the limit, and of all together at most
        `budget`. Without drafts the step computes `num_positions`, and `num_rows` of its rows bring a token. Ids of
        requests that do not speculate are ignored."""
        if budget <= 0:
            return {}
        queries = [
            DraftQuery(request_id=request_id, max_drafts=min(limit, self._sequences[request_id].max_drafts))
            for request_id, limit in limits
            if request_id in self._sequences and limit > 0 and self._is_due(self._sequences[request_id])
        ]
        chosen: dict[str, tuple[int, ...]] = {}
        for request_id, draft, _, length in self._paying_drafts(queries, num_rows, num_positions, budget):
            if length:
                sequence = self._sequences[request_id]
                chosen[request_id] = draft.token_ids[:length]
                sequence.draft, sequence.num_unchosen = draft, 0
            else:
                self.acceptance.passed(draft)
        return chosen

    def _is_due(self, sequence: _Speculating) -> bool:
        """Whether the sequence is queried in this step (`UNCHOSEN`), which counts."""
        if self._paused and all(self._is_paused(proposer.name) for proposer in sequence.proposers):
            return False
        sequence.num_unchosen = num = sequence.num_unchosen + 1
        return all(num < at_least or num % every == 0 for at_least, every in UNCHOSEN)

    def promising(self, request_ids: Sequence[str], *, num_rows: int) -> set[str]:
        """Returns the sequences that should sit out a step, because drafts after their known tokens would bring more
        than the step in flight and the next one. Such a sequence is due at its next query."""
        due: list[DraftQuery] = []
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None and self._is_due(sequence):
                due.append(DraftQuery(request_id=request_id, max_drafts=sequence.max_drafts))
        budget = sum([query.max_drafts for query in due])
        drafts = self._paying_drafts(due, num_rows, num_rows, budget)
        promising = {request_id for request_id, _, chances, length in drafts if sum(chances[:length]) > 1.0}
        for request_id in promising:
            self._sequences[request_id].num_unchosen -= 1
        return promising

    def _paying_drafts(
        self, queries: Sequence[DraftQuery], num_rows: int, num_positions: int, budget: int
    ) -> list[tuple[str, Draft, list[float], int]]:
        """For each query with a draft: the request id, the draft with its positions' chances, and how many of them pay.
        Proposers are queried only if drafts can pay."""
        if not queries:
            return []
        counts = {"num_rows": num_rows, "num_positions": num_positions}
        nums_drafts = (min(budget, len(queries)), min(budget, sum([query.max_drafts for query in queries])))
        if not may_pay(**counts, nums_drafts=nums_drafts, seconds=self.cost.seconds):
            return []
        best = self._propose(queries, num_rows, num_positions)
        drafts = [(query.request_id, *best[query.request_id]) for query in queries if query.request_id in best]
        chains = [chances for _, _, chances in drafts]
        lengths = choose_lengths(chains, **counts, budget=budget, seconds=self.cost.seconds)
        return [(*draft, length) for draft, length in zip(drafts, lengths, strict=True)]

    def applied(self, request_id: str, draft_ids: tuple[int, ...], num_brought: int) -> None:
        """Records that a row with these drafts brought `num_brought` tokens."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not num_brought:
            return
        counts = self.counts
        counts.num_rows += 1
        counts.num_tokens += num_brought
        self._recent_tokens += RECENT * (num_brought - self._recent_tokens)
        if not draft_ids:
            self.acceptance.idle(request_id)
            return
        draft, num_accepted = sequence.draft, min(num_brought - 1, len(draft_ids))
        verified = Draft(token_ids=draft_ids, source=draft.source, evidence=draft.evidence)
        self.acceptance.observe(request_id, verified, num_accepted)
        own, is_prediction = sequence.counts, draft.source == PredictionProposer.name
        sequence.counts = SequenceCounts(
            num_drafted=own.num_drafted + len(draft_ids),
            num_accepted=own.num_accepted + num_accepted,
            num_predicted=own.num_predicted + is_prediction * num_accepted,
            num_mispredicted=own.num_mispredicted + is_prediction * (len(draft_ids) - num_accepted),
        )
        counts.num_drafted += len(draft_ids)
        counts.num_accepted += num_accepted
        spared_s = num_accepted * self._spared_by_accepted_s
        counts.spared_s += spared_s
        if self._is_counted and draft.source in self._payoffs:
            self._payoffs[draft.source].spare(spared_s)
        counts.sources.setdefault(draft.source, SourceCounts()).add(len(draft_ids), num_accepted)
        self._draft_loads = None

    def take_counts(self, request_id: str) -> SequenceCounts:
        """The sequence's drafts since the last call."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.counts is NO_COUNTS:
            return NO_COUNTS
        counts, sequence.counts = sequence.counts, NO_COUNTS
        return counts

    def observe(self, batch: Batch, elapsed_s: float) -> None:
        """Records a step's time, before its rows are `applied`. An accepted draft spares a row's share of a step
        without drafts: of one row all of it, of eight rows an eighth. In a step with a prompt it spares nothing,
        because the time without drafts is unknown."""
        self._spared_by_accepted_s = 0.0
        self._is_counted = not (batch.has_prefill or self._is_after_prompt)
        self._is_after_prompt = batch.has_prefill
        verifying_s: Mapping[str, float] = {}
        if not batch.has_prefill:
            self.cost.observe(batch.num_tokens, elapsed_s)
            if num_drafted := sum([len(row.draft_ids) for row in batch.rows]):
                without_s = self.cost.seconds(batch.num_tokens - num_drafted)
                self._spared_by_accepted_s = without_s / len(batch.rows)
                longer_s = max(0.0, elapsed_s - without_s)
                self.counts.spent_s += longer_s
                verifying_s = self._by_source(batch, longer_s / num_drafted)
        for source, payoff in self._payoffs.items():
            spent_s = self._taken_s.get(source, 0.0) + verifying_s.get(source, 0.0)
            if payoff.observe(elapsed_s, spent_s) if self._is_counted else payoff.wait():
                self._paused_or_resumed(source, payoff)

    def _is_paused(self, source: str) -> bool:
        payoff = self._payoffs.get(source)
        return payoff is not None and payoff.is_paused

    def _by_source(self, batch: Batch, each_s: float) -> Mapping[str, float]:
        seconds: dict[str, float] = {}
        for row in batch.rows:
            if row.draft_ids and row.request_id in self._sequences:
                source = self._sequences[row.request_id].draft.source
                seconds[source] = seconds.get(source, 0.0) + each_s * len(row.draft_ids)
        return seconds

    def _paused_or_resumed(self, source: str, payoff: Payoff) -> None:
        """Forgets a proposer's record when it resumes: it drafts as at its start."""
        others = tuple([paused for paused in self._paused if paused.source != source])
        if payoff.is_paused:
            paused = PausedProposer(
                source=source, num_steps=payoff.num_paused, spared_s=payoff.spared_s, spent_s=payoff.spent_s
            )
            self._paused = (*others, paused)
            log.info("drafts do not pay and are paused: %s", paused)
            return
        self._paused = others
        self.acceptance.forget(source)
        for sequence in self._sequences.values():
            if any(proposer.name == source for proposer in sequence.proposers):
                sequence.num_unchosen = 0

    def take_seconds(self) -> float:
        """Returns the seconds of the proposers' models since the last call, by which engine steps are longer. `observe`
        counts them with the fetched step."""
        self._taken_s = {name: proposer.take_seconds() for name, proposer in self._timed.items()}
        spent_s = sum(self._taken_s.values())
        self.counts.spent_s += spent_s
        return spent_s

    def tokens_per_step(self) -> float:
        """Tokens a row brought recently, rounded to sixteenths so that gateways are not notified of small changes."""
        return round(self._recent_tokens * 16) / 16

    def load(self) -> SpeculationLoad:
        counts = self.counts
        if self._draft_loads is None:
            self._draft_loads = tuple(
                [
                    DraftCounts(source=source, drafted_at=tuple(own.drafted_at), accepted_at=tuple(own.accepted_at))
                    for source, own in counts.sources.items()
                ]
            )
        return SpeculationLoad(
            num_rows=counts.num_rows,
            num_tokens=counts.num_tokens,
            spared_s=counts.spared_s,
            spent_s=counts.spent_s,
            sources=self._draft_loads,
            paused=self._paused,
        )

    def assert_idle(self) -> None:
        assert not self._sequences, f"requests {sorted(self._sequences)} speculate still"
        assert not any(len(proposer) for proposer in self._proposers)

    def _propose(
        self, queries: Sequence[DraftQuery], num_rows: int, num_positions: int
    ) -> dict[str, tuple[Draft, list[float]]]:
        drafts: dict[str, tuple[Draft, list[float]]] = {}
        promised: dict[str, float] = {}
        for proposer in self._proposers:
            own = [query for query in queries if proposer in self._sequences[query.request_id].proposers]
            timed = self._timed.get(proposer.name)
            if own and timed is not None:
                own = self._paying(timed, proposer.name, own, num_rows, num_positions)
            for query, draft in zip(own, proposer.propose(own) if own else (), strict=True):
                if not draft.token_ids:
                    continue
                chances = self.acceptance.chances(query.request_id, draft, len(draft.token_ids))
                expected = sum(chances)
                if expected > promised.get(query.request_id, 0.0):
                    drafts[query.request_id], promised[query.request_id] = (draft, chances), expected
        return drafts

    def _paying(
        self, proposer: TimedProposer, name: str, queries: Sequence[DraftQuery], num_rows: int, num_positions: int
    ) -> list[DraftQuery]:
        """The queries for as many drafts as pay, including the time to make them; none during a pause."""
        if self._is_paused(name):
            return []
        unknown, max_drafts = Draft(source=name), max(query.max_drafts for query in queries)
        depth = choose_depth(
            [self.acceptance.chances(query.request_id, unknown, max_drafts) for query in queries],
            max_drafts=max_drafts,
            num_rows=num_rows,
            num_positions=num_positions,
            seconds=self.cost.seconds,
            drafting=proposer.seconds,
        )
        if depth:
            self._num_unpaid = 0
            return [replace(query, max_drafts=min(depth, query.max_drafts)) for query in queries]
        self._num_unpaid += 1
        return [replace(queries[0], max_drafts=1)] if self._num_unpaid % PROBE_CALLS == 0 else []
