"""The contract of every proposer, whatever its drafts are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import pytest

from kvtransfer.hashing import chain_hashes
from protos.values import SamplingParams
from workers.batch import Batch, Row, RowOutput, StepOutput
from workers.speculation.proposer import Draft, DraftQuery, Proposer
from workers.speculation.proposers.draft_model_proposer import DraftLimits, DraftModelProposer
from workers.speculation.proposers.ngram import NgramProposer
from workers.speculation.proposers.prediction import PredictionProposer
from workers.speculation.proposers.suffix import SuffixProposer

VOCAB = 40
BLOCK = 4
PAGES = 80
pages = count(0, PAGES)


class SummingDraftModel:
    """The token after a sequence depends on the sum of what stands in its pages."""

    def __init__(self) -> None:
        self._cache: dict[int, int] = {}

    def draft(self, batch: Batch) -> StepOutput:
        return StepOutput(rows=tuple([self._answer(row) for row in batch.rows]))

    def _answer(self, row: Row) -> RowOutput:
        slots = [row.block_ids[position // BLOCK] * BLOCK + position % BLOCK for position in range(row.stop)]
        self._cache.update(zip(slots[row.start :], row.token_ids, strict=True))
        token_id = sum(self._cache[slot] for slot in slots) % VOCAB
        return RowOutput(token_ids=(token_id,) if row.sample is not None else ())


def draft_model() -> Proposer:
    limits = DraftLimits(
        block_size=BLOCK, num_pages=10**6, scratch_pages=3, chunk=10**4, max_len=10**4, vocab_size=VOCAB
    )
    return DraftModelProposer(SummingDraftModel(), limits, clock=lambda: 0.0)


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "prediction": PredictionProposer,
    "model": draft_model,
}


@dataclass
class Sequence:
    request_id: str = "r"
    prompt_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    prediction_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tables: list[list[int]] = field(
        default_factory=lambda: [list(range(first := next(pages), first + PAGES))], compare=False
    )

    @property
    def hashes(self) -> list[bytes]:
        return list(chain_hashes((*self.prompt_ids, *self.output_ids), BLOCK, salt=self.cache_salt))


@pytest.fixture(params=PROPOSERS)
def proposer(request: pytest.FixtureRequest) -> Proposer:
    return PROPOSERS[request.param]()


def repeating(seed: int, num_tokens: int = 200) -> tuple[int, ...]:
    """Tokens in which pieces occur again."""
    rng, tokens = Random(seed), list[int]()
    while len(tokens) < num_tokens:
        first = rng.randrange(max(1, len(tokens)))
        again = tokens[first : first + rng.randrange(30)] if rng.random() < 0.6 else []
        tokens += again or [rng.randrange(VOCAB) for _ in range(8)]
    return tuple(tokens[:num_tokens])


def draft(proposer: Proposer, request_id: str, max_drafts: int = 6) -> Draft:
    (answer,) = proposer.propose([DraftQuery(request_id=request_id, max_drafts=max_drafts)])
    return answer


def test_a_draft_is_short_enough_named_and_of_the_vocabulary(proposer: Proposer) -> None:
    tokens = repeating(1)
    sequence = Sequence(prompt_ids=tokens[:80], prediction_ids=tokens)
    proposer.begin(sequence)
    for position, token_id in enumerate(tokens[80:]):
        proposed = draft(proposer, "r", position % 7)
        assert len(proposed.token_ids) <= position % 7
        assert all(0 <= token_id < VOCAB for token_id in proposed.token_ids)
        assert proposed.source == proposer.name or not proposed.token_ids
        sequence.output_ids.append(token_id)


def test_each_query_is_answered_in_its_order_and_for_itself(proposer: Proposer) -> None:
    sequences = [Sequence(request_id=str(number), prompt_ids=repeating(number)) for number in range(5)]
    alone = []
    for sequence in sequences:
        proposer.begin(sequence)
        alone.append(draft(proposer, sequence.request_id))
    queries = [DraftQuery(request_id=sequence.request_id, max_drafts=6) for sequence in reversed(sequences)]
    assert list(proposer.propose(queries)) == alone[::-1]


def test_a_moved_sequence_gets_the_same_drafts(proposer: Proposer) -> None:
    """After a failure, a move, or steps in which it was not queried."""
    tokens = repeating(2)
    began = Sequence(request_id="began", prompt_ids=tokens[:50])
    proposer.begin(began)
    for token_id in tokens[50:]:
        draft(proposer, "began")
        began.output_ids.append(token_id)
    proposer.begin(Sequence(request_id="moved", prompt_ids=tokens[:50], output_ids=list(tokens[50:])))
    late = Sequence(request_id="late", prompt_ids=tokens[:50])
    proposer.begin(late)
    late.output_ids += tokens[50:]
    assert draft(proposer, "began") == draft(proposer, "moved") == draft(proposer, "late")


def test_a_proposer_changes_no_token_of_a_sequence(proposer: Proposer) -> None:
    tokens = repeating(3)
    sequence = Sequence(prompt_ids=tokens[:50], output_ids=list(tokens[50:]), prediction_ids=tokens[:20])
    proposer.begin(sequence)
    draft(proposer, "r")
    assert sequence == Sequence(prompt_ids=tokens[:50], output_ids=list(tokens[50:]), prediction_ids=tokens[:20])


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4])
def test_the_shortest_sequences_are_queried_as_well(proposer: Proposer, num_prompt: int) -> None:
    sequence = Sequence(prompt_ids=(7,) * num_prompt)
    proposer.begin(sequence)
    for _ in range(8):
        draft(proposer, "r")
        sequence.output_ids.append(7)


def test_an_ended_sequence_frees_its_id(proposer: Proposer) -> None:
    tokens = repeating(4)
    proposer.begin(Sequence(prompt_ids=tokens))
    draft(proposer, "r")
    proposer.begin(Sequence(request_id="other", prompt_ids=tokens))
    assert len(proposer) == 2
    proposer.end("r")
    proposer.end("other")
    assert len(proposer) == 0
    again = Sequence(prompt_ids=(1, 2))
    proposer.begin(again)
    proposed = draft(proposer, "r")
    proposer.end("r")
    proposer.begin(replace(again, request_id="new"))
    assert draft(proposer, "new") == proposed
    proposer.end("new")


def test_an_unqueried_sequence_may_end(proposer: Proposer) -> None:
    proposer.begin(Sequence(prompt_ids=repeating(5)))
    proposer.end("r")
    assert len(proposer) == 0
