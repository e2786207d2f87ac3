"""Which steps are replayed, at which size, and what stands in the rows that nobody asked for."""

from __future__ import annotations

from typing import Any

import pytest

from protos.values import SamplingParams
from workers.batch import Batch, Row, Sample
from workers.runner.packed_batch import KNOWN, Packed, pack
from workers.runner.padding import NOWHERE, captured_sizes, nothing, padded, size_for

SAMPLE = Sample(params=SamplingParams(), index=0)


def decoding(num_rows: int) -> Packed:
    rows = (
        Row(
            request_id=str(n),
            token_ids=(50 + n,),
            start=4 + n % 4,
            block_tables=((n, 20 + n),),
            sample=SAMPLE,
            prompt_len=3,
        )
        for n in range(num_rows)
    )
    return pack(Batch(rows=tuple(rows)), block_size=4, sampled={})


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_sizes_end_with_as_many_rows_as_may_run(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert captured_sizes(max_rows) == sizes


@pytest.mark.parametrize("max_rows", [64, 100, 256, 1000])
def test_padding_stays_small_and_graphs_few(max_rows: int) -> None:
    sizes = captured_sizes(max_rows)
    for num_rows in range(9, max_rows + 1):
        size = size_for(nothing(num_rows), sizes)
        assert size is not None
        assert size - num_rows < num_rows
        assert num_rows < 57 or size - num_rows <= num_rows / 4
    assert len(sizes) <= 36


def row(token_ids: tuple[int, ...], **rest: Any) -> Row:
    return Row(request_id="r", token_ids=token_ids, start=0, block_tables=((0,),), **rest)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((row((1, 2), sample=SAMPLE),), "a prompt"),
        ((row((1,), sample=SAMPLE), row((1, 2, 3))), "a prompt beside it"),
        ((row((1,)),), "a chunk of one token that samples nothing"),
        ((row((1,), prompt_targets=(2,), sample=SAMPLE),), "a position that is scored"),
        ((row((1,), sample=SAMPLE),) * 9, "more rows than were captured"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_uncaptured_steps_are_not_replayed(rows: tuple[Row, ...], why: str) -> None:
    packed = pack(Batch(rows=rows), block_size=4, sampled={})
    assert size_for(packed, (1, 2, 4, 8)) is None, why


def test_rows_of_padding_compute_nothing_that_lasts() -> None:
    step = padded(decoding(3), 4)
    assert step.token_ids_T.tolist() == [50, 51, 52, 0]
    assert step.tables[0].slots_T.tolist() == [20 * 4, 21 * 4 + 1, 22 * 4 + 2, NOWHERE]
    assert step.context_lens == (5, 6, 7, 0)
    assert step.positions_T.tolist() == [4, 5, 6, 0]
    assert step.follows_T.tolist() == [KNOWN] * 4
    assert step.tables[0].tables_SB.tolist() == [[0, 20], [1, 21], [2, 22], [0, 0]]
    assert step.query_starts == (0, 1, 2, 3, 4)
    assert step.logit_rows_R.tolist() == [0, 1, 2, 3]
    assert len(step.prompt_lens) == 4


def test_a_step_of_nothing_is_all_padding() -> None:
    step = nothing(2)
    assert (step.tables[0].slots_T.tolist(), step.context_lens) == ([NOWHERE] * 2, (0, 0))
    assert size_for(step, (1, 2)) == 2
