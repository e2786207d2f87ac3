"""When a head may continue a sequence: its features last until the entries of the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.values import SamplingParams
from workers.batch import Batch, RowOutput, StepOutput
from workers.speculation.proposer import ComputedRow, DraftQuery
from workers.speculation.proposers.draft_model_proposer import DraftLimits
from workers.speculation.proposers.head_proposer import HeadProposer

BLOCK = 4


@dataclass
class Sequence:
    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    prediction_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    hashes: list[bytes] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=lambda: [[3, 5, 7]])


class CountingHead:
    """Drafts the token after the last one. It has features of the rows that sampled in its last call alone."""

    def __init__(self) -> None:
        self.has: set[str] = set()

    def head_computed(self, batch: Batch, first_hidden: tuple[int, ...]) -> StepOutput:
        self.has = {row.request_id for row in batch.rows if row.sample is not None}
        return StepOutput(
            rows=tuple([RowOutput(token_ids=(row.token_ids[-1] + 1,) if row.sample else ()) for row in batch.rows])
        )

    def head_next(self, batch: Batch) -> StepOutput:
        assert {row.request_id for row in batch.rows} <= self.has, "features of another step are gone"
        return self.head_computed(batch, ())


def proposer() -> HeadProposer:
    limits = DraftLimits(block_size=BLOCK, num_pages=20, scratch_pages=2, chunk=64, max_len=64, vocab_size=99)
    return HeadProposer("eagle", CountingHead(), limits, clock=lambda: 0.0)


def prompt_of(sequence: Sequence) -> ComputedRow:
    *_, last = sequence.output_ids
    return ComputedRow(
        request_id=sequence.request_id,
        start=0,
        token_ids=sequence.prompt_ids,
        next_id=last,
        first_hidden=0,
        pages=tuple(sequence.tables[0]),
        prompt_len=len(sequence.prompt_ids),
    )


def test_a_sequence_that_sat_out_drafts_its_first_alone() -> None:
    head = proposer()
    first, second = Sequence("a", (1, 2, 3), [4]), Sequence("b", (1, 2, 3, 4), [5])
    for sequence in (first, second):
        head.begin(sequence)
    head.computed([prompt_of(first)])
    head.computed([prompt_of(second)])
    queries = [DraftQuery(request_id=name, max_drafts=3) for name in "ab"]
    assert [draft.token_ids for draft in head.propose(queries)] == [(5,), (6, 7, 8)]


def test_rows_of_others_make_entries_and_no_drafts() -> None:
    head = proposer()
    head.computed([prompt_of(Sequence("unknown", (1, 2, 3), [4]))])
    assert len(head) == 0
