"""A batch as the arrays that a model reads, on the host. No torch, so that the arrays can be tested alone.

Legend: T tokens of the batch (rows packed), S rows, B blocks of the longest row, R positions with logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from workers.batch import MEAN, Batch, Row

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
    token at this position, or KNOWN. The other fields are as in `AttentionInputs` and `ModelInputs`. `pooled_rows_P`:
    positions whose hidden states are wanted, by row. `adapters`: the places of each adapter's tokens; None: all."""

    token_ids_T: NDArray[np.int64]
    follows_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    logit_rows_R: NDArray[np.int64]
    tables: tuple[PackedTables, ...]
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    max_query: int
    has_prompts: bool = True
    pooled_rows_P: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    adapters: tuple[tuple[str, NDArray[np.int64] | None], ...] = ()


def pack(batch: Batch, *, block_size: int, sampled: Mapping[int, int], splits_drafts: bool = False) -> Packed:
    """Packs a batch. `sampled` maps each sampling row of the previous batch to the place of its token (`sampled_rows`).

    Logits are ordered by row; within a row, positions that predict prompt targets come first. With `splits_drafts` each
    draft is a row of its own, with the tables of its row: it is attended to as in a step that decodes.
    """
    rows = tuple(chain.from_iterable(map(_split, batch.rows))) if splits_drafts else batch.rows
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
        has_prompts=batch.has_prefill,
        pooled_rows_P=np.array(list(chain.from_iterable(map(_pooled, rows, query_starts.tolist()))), dtype=np.int64),
        adapters=_adapters(rows, rows_T) if any(row.adapter for row in rows) else (),
    )


def _adapters(rows: Sequence[Row], rows_T: NDArray[np.int64]) -> tuple[tuple[str, NDArray[np.int64] | None], ...]:
    adapters_S = [row.adapter for row in rows]
    adapters = tuple(dict.fromkeys(filter(None, adapters_S)))
    if adapters == (adapters_S[0],) and all(adapters_S):
        return ((adapters[0], None),)
    numbers_T = np.array([adapters.index(name) if name else -1 for name in adapters_S])[rows_T]
    return tuple([(name, np.flatnonzero(numbers_T == number)) for number, name in enumerate(adapters)])


def _tables(
    blocks: Sequence[tuple[int, ...]], rows_T: NDArray[np.int64], positions_T: NDArray[np.int64], block_size: int
) -> PackedTables:
    tables_SB = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for table_B, block_ids in zip(tables_SB, blocks, strict=True):
        table_B[: len(block_ids)] = block_ids
    blocks_T = tables_SB[rows_T, positions_T // block_size].astype(np.int64)
    return PackedTables(slots_T=blocks_T * block_size + positions_T % block_size, tables_SB=tables_SB)


def sampled_rows(batch: Batch) -> dict[int, int]:
    """For each sampling row without drafts, the place of its token among those that the step samples. No row depends on
    one with drafts."""
    places, place = dict[int, int](), 0
    for index, row in enumerate(batch.rows):
        if row.sample is not None:
            if not row.draft_ids:
                places[index] = place
            place += 1 + len(row.draft_ids)
    return places


def num_sampled(batch: Batch) -> int:
    """The number of tokens that the step samples: one for each sampling row, and one for each draft."""
    return sum([1 + len(row.draft_ids) for row in batch.rows if row.sample is not None])


def _split(row: Row) -> Sequence[Row]:
    if not row.draft_ids:
        return (row,)
    first = row.stop - len(row.draft_ids)
    drafts = [
        replace(row, token_ids=(draft_id,), start=start, draft_ids=(), prompt_targets=())
        for start, draft_id in enumerate(row.draft_ids, first)
    ]
    return (replace(row, draft_ids=()), *drafts)


def _tokens(row: Row) -> tuple[int, ...]:
    return row.token_ids + row.draft_ids if row.depends_on_row is None else (*row.token_ids, 0)


def _wanted(row: Row, start: int) -> list[int]:
    """Indices into T of the logits of a row that starts at `start`: first the positions that predict its targets, then
    the sampled one."""
    wanted = list(range(start, start + len(row.prompt_targets)))
    if row.sample is not None:
        wanted += range(start + row.num_tokens - 1 - len(row.draft_ids), start + row.num_tokens)
    return wanted


def num_pooled(row: Row) -> int:
    """The number of a row's positions whose hidden states are pooled: all, or the last one."""
    return 0 if not row.pooling else row.num_tokens if row.pooling == MEAN else 1


def _pooled(row: Row, start: int) -> range:
    stop = start + row.num_tokens
    return range(stop - num_pooled(row), stop)
