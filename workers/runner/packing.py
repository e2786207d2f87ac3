"""A batch as the arrays that a model reads, on the host. No torch, so that the arrays can be tested alone.

Legend: T tokens of the batch (rows packed), S rows, B blocks of the longest row, R positions with logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from workers.batch import Batch, Row

KNOWN = -1
"""The value in `follows_T` of a token that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTables:
    """The tables of one group, as in `GroupTables`."""

    slots_T: NDArray[np.int64]
    tables_SB: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A batch as arrays of int64. `follows_T` is the index, among the tokens that the previous step sampled, of the
    token at this position, or KNOWN. The other fields are as in `AttentionInputs` and `ModelInputs`."""

    token_ids_T: NDArray[np.int64]
    follows_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    logit_rows_R: NDArray[np.int64]
    tables: tuple[PackedTables, ...]
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    max_query: int


def pack(batch: Batch, *, block_size: int, sampled: Mapping[int, int]) -> Packed:
    """Packs a batch. `sampled` maps each sampling row of the previous batch to its place among the sampling rows.

    Logits are ordered by row; within a row, positions that predict prompt targets come first.
    """
    rows = batch.rows
    lens_S = np.array([row.num_tokens for row in rows])
    starts_S = np.array([row.start for row in rows])
    query_starts = np.concatenate(([0], np.cumsum(lens_S)))
    num_tokens = int(query_starts[-1])
    positions_T = np.arange(num_tokens) + np.repeat(starts_S - query_starts[:-1], lens_S)
    rows_T = np.repeat(np.arange(len(rows)), lens_S)
    token_ids_T = np.fromiter(chain.from_iterable(map(_tokens, rows)), dtype=np.int64, count=num_tokens)
    follows_T = np.full(num_tokens, KNOWN)
    for row, stop in zip(rows, query_starts[1:].tolist(), strict=True):
        if row.depends_on_row is not None:
            follows_T[stop - 1] = sampled[row.depends_on_row]
    return Packed(
        token_ids_T=token_ids_T,
        follows_T=follows_T,
        positions_T=positions_T,
        logit_rows_R=np.array(list(chain.from_iterable(map(_wanted, rows, query_starts.tolist()))), dtype=np.int64),
        tables=tuple(
            _tables(group, rows_T, positions_T, block_size)
            for group in zip(*(row.block_tables for row in rows), strict=True)
        ),
        query_starts=tuple(query_starts.tolist()),
        context_lens=tuple((starts_S + lens_S).tolist()),
        prompt_lens=tuple(row.prompt_len for row in rows),
        max_query=int(lens_S.max()),
    )


def _tables(
    blocks: Sequence[tuple[int, ...]], rows_T: NDArray[np.int64], positions_T: NDArray[np.int64], block_size: int
) -> PackedTables:
    """Tables of one group, from the blocks of each row."""
    tables_SB = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for table_B, block_ids in zip(tables_SB, blocks, strict=True):
        table_B[: len(block_ids)] = block_ids
    blocks_T = tables_SB[rows_T, positions_T // block_size].astype(np.int64)
    return PackedTables(slots_T=blocks_T * block_size + positions_T % block_size, tables_SB=tables_SB)


def sampled_rows(batch: Batch) -> dict[int, int]:
    """For each sampling row, its place among the sampling rows."""
    rows = [index for index, row in enumerate(batch.rows) if row.sample is not None]
    return {index: place for place, index in enumerate(rows)}


def _tokens(row: Row) -> tuple[int, ...]:
    return row.token_ids if row.depends_on_row is None else (*row.token_ids, 0)


def _wanted(row: Row, start: int) -> list[int]:
    """Indices into T of the logits of a row that starts at `start`: first the positions that predict its targets, then
    the sampled one."""
    wanted = list(range(start, start + len(row.prompt_targets)))
    if row.sample is not None:
        wanted += range(start + row.num_tokens - 1 - len(row.draft_ids), start + row.num_tokens)
    return wanted
