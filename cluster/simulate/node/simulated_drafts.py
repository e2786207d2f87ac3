"""Simulated speculation: drafts that are right as often as measured, and what a device brings of a row with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from cluster.simulate.latency.step_work import Latency, StepWork, step_of
from workers.batch import Row, RowOutput, Sample
from workers.sampling.draft_verification import drafted_samples
from workers.speculation.proposer import NO_DRAFT, ComputedRow, Draft, DraftQuery, ProposerNeeds, SpeculatedSequence
from workers.speculation.speculation import Speculation
from workers.toy import MODULUS, summed_token

_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrafter:
    """`acceptance`: for each position of a draft the probability that it is right if those before it are; the last one
    counts for all further positions. `latency`: of a draft model's step or a head's; None if drafts take no time.
    `host_s`: the host's work for a step that follows known tokens."""

    source: str
    acceptance: tuple[float, ...]
    max_drafts: int
    latency: Latency | None = None
    host_s: float = 0.0

    def speculation(self, *, weight: int, vocab_size: int, key: str, wait: Callable[[float], None]) -> Speculation:
        """`wait` lets the device's time pass."""
        drafts = SimulatedDrafts(self, weight=weight, vocab_size=vocab_size, key=key)
        proposer = drafts if self.latency is None else TimedDrafts(drafts, self.latency, wait)
        return Speculation([proposer], max_drafts=self.max_drafts)


@dataclass(slots=True)
class _Summed:
    """The sum over the first `num_tokens` tokens of a sequence, and its last draft."""

    sequence: SpeculatedSequence
    num_tokens: int = 0
    total: int = 0
    num_written: int = 0  # positions whose KV a draft model has, if the last draft was right
    num_drafted: int = 0


class SimulatedDrafts:
    """Whether a position of an answer is right is fixed by its place in the draft, so that a run does not depend on the
    order of its events."""

    needs = ProposerNeeds()

    def __init__(self, drafter: SimulatedDrafter, *, weight: int, vocab_size: int, key: str) -> None:
        self.name = drafter.source
        self._acceptance = drafter.acceptance
        self._weight = weight
        self._vocab_size = vocab_size
        self._key = crc32(key.encode())
        self.sums: dict[str, _Summed] = {}

    def begin(self, sequence: SpeculatedSequence) -> None:
        self.sums[sequence.request_id] = _Summed(sequence)

    def computed(self, rows: Sequence[ComputedRow]) -> None: ...

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        return [self._draft(query) for query in queries]

    def end(self, request_id: str) -> None:
        del self.sums[request_id]

    def __len__(self) -> int:
        return len(self.sums)

    def _draft(self, query: DraftQuery) -> Draft:
        if not query.max_drafts:
            return NO_DRAFT
        summed = self.sums[query.request_id]
        sequence = summed.sequence
        num_tokens = len(sequence.prompt_ids) + len(sequence.output_ids)
        self._add_known(summed, num_tokens)
        index, total, token_ids, is_right = len(sequence.output_ids), summed.total, list[int](), True
        for place in range(query.max_drafts):
            sample = Sample(params=sequence.sampling, index=index + place)
            token_id = summed_token(total, weight=self._weight, vocab_size=self._vocab_size, sample=sample)
            chance = self._acceptance[min(place, len(self._acceptance) - 1)]
            is_right = is_right and _share(self._key + crc32(query.request_id.encode()), index + place) < chance
            token_ids.append(token_id if is_right else (token_id + 1) % self._vocab_size)
            total += kv_term(token_ids[-1], num_tokens + place)
        return Draft(token_ids=tuple(token_ids), source=self.name)

    @staticmethod
    def _add_known(summed: _Summed, num_tokens: int) -> None:
        prompt, output = summed.sequence.prompt_ids, summed.sequence.output_ids
        for position in range(summed.num_tokens, num_tokens):
            token_id = prompt[position] if position < len(prompt) else output[position - len(prompt)]
            summed.total += kv_term(token_id, position)
        summed.num_tokens = num_tokens


class TimedDrafts:
    """Drafts of a model with its own KV: the first draft computes missing tokens, each further one takes a step."""

    needs = ProposerNeeds()

    def __init__(self, drafts: SimulatedDrafts, latency: Latency, wait: Callable[[float], None]) -> None:
        self.name = drafts.name
        self._drafts = drafts
        self._latency = latency
        self._wait = wait
        self._spent_s = 0.0
        self._mean_len = 0.0  # of the sequences of the last call

    def begin(self, sequence: SpeculatedSequence) -> None:
        self._drafts.begin(sequence)

    def computed(self, rows: Sequence[ComputedRow]) -> None: ...

    def skipped(self, rows: Sequence[ComputedRow]) -> None: ...

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft]:
        if not queries:
            return []
        drafts = self._drafts.propose(queries)
        first: list[tuple[int, int]] = []  # (computed tokens, context) of each row of a step
        for query in queries:
            summed = self._drafts.sums[query.request_id]
            num_right = max(0, min(summed.num_tokens - summed.num_written - 1, summed.num_drafted - 1))
            first.append((summed.num_tokens - summed.num_written - num_right, summed.num_tokens))
            summed.num_written, summed.num_drafted = summed.num_tokens, query.max_drafts
        taken_s = self._latency.step_s(step_of(first))
        for place in range(1, max(query.max_drafts for query in queries)):
            lengths = [length for query, (_, length) in zip(queries, first, strict=True) if query.max_drafts > place]
            taken_s += self._latency.step_s(step_of([(1, length + place) for length in lengths]))
        self._mean_len = sum([length for _, length in first]) / len(first)
        self._wait(taken_s)
        self._spent_s += taken_s
        return drafts

    def end(self, request_id: str) -> None:
        self._drafts.end(request_id)

    def __len__(self) -> int:
        return len(self._drafts)

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """Uses the lengths of the last call; 0 before it."""
        read = num_rows * self._mean_len
        step = StepWork(num_rows, num_rows, read, read, num_rows, read)
        return num_drafts * self._latency.step_s(step) if self._mean_len else 0.0

    def take_seconds(self) -> float:
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def verified_row(row: Row, first: int, total: int, *, weight: int, vocab_size: int) -> tuple[RowOutput, int, int]:
    """Returns the output of a row with drafts, from the sum `total` of the positions before `first`, its first draft;
    then the number of verified positions, and their sum."""
    assert row.sample is not None
    token_ids = list[int]()
    for place, sample in enumerate(drafted_samples(row.sample, row.draft_ids)):
        token_ids.append(summed_token(total, weight=weight, vocab_size=vocab_size, sample=sample))
        if place == len(row.draft_ids) or token_ids[-1] != row.draft_ids[place]:
            break
        total += kv_term(row.draft_ids[place], first + place)
    return RowOutput(token_ids=tuple(token_ids)), first + len(token_ids) - 1, total


def kv_term(token_id: int, position: int) -> int:
    """The term of a position in the sum that determines the toy model's tokens."""
    return (position + 1) * ((token_id + 1) * 7919 + position) % MODULUS


def _share(key: int, number: int) -> float:
    """A number from 0 to 1. Mixed as in Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
    (2014)."""
    state = (key * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) & _WORD
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
    return (state ^ (state >> 31)) * 2.0**-64 * (1 - 2**-53)
