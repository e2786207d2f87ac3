"""Which positions of a sequence a proposer has written in its own pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.hashing import chain_hashes
from protos.values import SamplingParams
from workers.speculation.proposers.draft_pages import DraftPages, num_tokens

BLOCK = 4


@dataclass
class Sequence:
    request_id: str
    prompt_ids: tuple[int, ...]
    pages: list[int]
    output_ids: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    prediction_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def tables(self) -> list[list[int]]:
        return [self.pages]

    @property
    def hashes(self) -> list[bytes]:
        return list(chain_hashes((*self.prompt_ids, *self.output_ids), BLOCK, salt=self.cache_salt))


def test_a_sequence_begins_with_anothers_blocks() -> None:
    pages, first = DraftPages(BLOCK), Sequence("a", tuple(range(10)), [3, 5, 7])
    assert pages.num_written(first) == 0
    pages.wrote(first, 10)
    pages.end("a")
    assert pages.num_written(Sequence("b", (*range(8), 50, 51), [3, 5, 9])) == 8
    assert pages.num_written(Sequence("c", tuple(range(10)), [3, 6, 7])) == 4, "page 6 came from another worker"
    assert pages.num_written(Sequence("d", tuple(range(10)), [3, 5, 7])) == 8, "a part of a block has no hash"
    assert pages.num_written(Sequence("e", tuple(range(10)), [3, 5, 7], cache_salt=b"other")) == 0
    assert pages.num_written(Sequence("f", tuple(range(1, 11)), [3, 5, 7])) == 0


def test_a_page_written_by_another_sequence_is_lost() -> None:
    pages, first = DraftPages(BLOCK), Sequence("a", tuple(range(10)), [3, 5, 7])
    pages.wrote(first, 10)
    pages.wrote(Sequence("b", (60, 61), [7]), 2)
    assert pages.num_written(first) == 8
    pages.wrote(Sequence("c", (70, 71), [3]), 2)
    pages.end("a")
    assert pages.num_written(first) == 0


def test_a_preempted_sequence_begins_with_its_new_tables_pages() -> None:
    pages, sequence = DraftPages(BLOCK), Sequence("a", tuple(range(10)), [3, 5, 7])
    pages.wrote(sequence, 10)
    sequence.pages = []
    assert pages.num_written(sequence) == 0
    sequence.pages = [3, 8, 9]
    assert pages.num_written(sequence) == 4


def test_right_drafts_need_not_be_written_again() -> None:
    pages, sequence = DraftPages(BLOCK), Sequence("a", tuple(range(6)), [3, 5])
    pages.wrote(sequence, 6, (20, 21, 22))
    assert pages.num_written(sequence) == 6
    sequence.output_ids += [20]
    assert pages.num_written(sequence) == 7
    sequence.output_ids += [21, 22]
    sequence.pages += [9]
    assert pages.num_written(sequence) == 8, "the third draft had no page"
    pages.wrote(sequence, num_tokens(sequence), (30, 31))
    sequence.output_ids += [30, 99]
    assert pages.num_written(sequence) == 10
