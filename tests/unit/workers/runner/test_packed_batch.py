"""A batch has every token once, where it belongs, in the order in which it is read."""

from __future__ import annotations

from typing import Any

from protos.values import SamplingParams
from workers.batch import Batch, Row, Sample
from workers.runner.packed_batch import KNOWN, pack, sampled_rows

SAMPLE = Sample(params=SamplingParams(), index=0)


def row(token_ids: tuple[int, ...], start: int, block_ids: tuple[int, ...], **rest: Any) -> Row:
    return Row(request_id="r", token_ids=token_ids, start=start, block_tables=(block_ids,), **rest)


def test_rows_stand_side_by_side_each_at_its_own_positions() -> None:
    rows = (row((11, 12, 13), 2, (5, 9), prompt_len=5), row((21,), 8, (7, 1, 3), sample=SAMPLE, prompt_len=6))
    packed = pack(Batch(rows=rows), block_size=4, sampled={})
    assert packed.token_ids_T.tolist() == [11, 12, 13, 21]
    assert packed.positions_T.tolist() == [2, 3, 4, 8]
    assert packed.tables[0].slots_T.tolist() == [5 * 4 + 2, 5 * 4 + 3, 9 * 4, 3 * 4]
    assert packed.tables[0].tables_SB.tolist() == [[5, 9, 0], [7, 1, 3]]
    assert (packed.query_starts, packed.context_lens, packed.prompt_lens) == ((0, 3, 4), (5, 9), (5, 6))
    assert packed.max_query == 3
    assert packed.logit_rows_R.tolist() == [3], "logits are asked for only where a token is sampled"


def test_every_group_of_layers_has_tables_of_its_own() -> None:
    rows = tuple(
        Row(request_id="r", token_ids=(1, 2), start=3, block_tables=((5, 9), (first, first + 1)), prompt_len=5)
        for first in (6, 2)
    )
    full, windowed = pack(Batch(rows=rows), block_size=4, sampled={}).tables
    assert full.slots_T.tolist() == [5 * 4 + 3, 9 * 4] * 2
    assert windowed.slots_T.tolist() == [6 * 4 + 3, 7 * 4, 2 * 4 + 3, 3 * 4]
    assert windowed.tables_SB.tolist() == [[6, 7], [2, 3]]


def test_logits_are_asked_for_in_the_order_they_are_read() -> None:
    rows = (
        row((1, 2, 3), 0, (0,), prompt_targets=(2, 3), sample=SAMPLE),
        row((4, 5), 0, (1,)),
        row((6,), 3, (2,), sample=SAMPLE),
    )
    batch = Batch(rows=rows)
    assert pack(batch, block_size=4, sampled={}).logit_rows_R.tolist() == [0, 1, 2, 5]
    assert sampled_rows(batch) == {0: 0, 2: 1}


def test_a_following_row_names_the_place_of_its_token() -> None:
    before = Batch(rows=(row((1,), 0, (0,)), row((2,), 0, (1,), sample=SAMPLE), row((3,), 0, (2,), sample=SAMPLE)))
    rows = (row((), 1, (2,), depends_on_row=2, sample=SAMPLE), row((8, 9), 0, (3,)))
    packed = pack(Batch(rows=rows), block_size=4, sampled=sampled_rows(before))
    assert packed.follows_T.tolist() == [1, KNOWN, KNOWN]
    assert packed.positions_T.tolist() == [1, 0, 1]
    assert packed.context_lens == (2, 2)
    assert packed.logit_rows_R.tolist() == [0]
