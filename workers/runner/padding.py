"""Pads decode steps to the few sizes that have been captured, and makes steps of padding alone. No torch: pure
functions over host arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workers.runner.packed_batch import KNOWN, Packed, PackedTables

NOWHERE = -1
"""A slot that kernels skip."""


def captured_sizes(max_rows: int) -> tuple[int, ...]:
    """Sizes of captured graphs, ascending: 1, 2, 4, then in steps of 8 up to 64, of 16 up to 256, of 64 beyond, and
    `max_rows` itself. A step of more than 8 rows is padded by less than a half, one of 64 by at most an eighth."""
    steps = (*range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64))
    return tuple(sorted({size for size in (1, 2, 4, *steps) if size < max_rows} | {max_rows}))


def warming_steps(max_tokens: int, max_rows: int, *, block_size: int, num_groups: int) -> Iterator[Packed]:
    """A decode step, and prompts of 2, 3, 5, 9 and so on up to `max_tokens` tokens, with logits of at most `max_rows`
    positions; no block is written. Kernels change their tiles at powers of two."""
    yield nothing(1, num_groups)
    lengths = {min(2**power + 1, max_tokens) for power in range(max_tokens.bit_length())}
    for num_tokens in sorted(lengths):
        tables_SB = np.zeros((1, -(-num_tokens // block_size)), dtype=np.int32)
        table = PackedTables(slots_T=np.full(num_tokens, NOWHERE), tables_SB=tables_SB)
        yield Packed(
            token_ids_T=np.zeros(num_tokens, dtype=np.int64),
            follows_T=np.full(num_tokens, KNOWN),
            positions_T=np.arange(num_tokens),
            logit_rows_R=np.arange(max(0, num_tokens - max_rows), num_tokens),
            tables=(table,) * num_groups,
            query_starts=(0, num_tokens),
            context_lens=(num_tokens,),
            prompt_lens=(num_tokens,),
            max_query=num_tokens,
        )


def size_for(packed: Packed, sizes: tuple[int, ...]) -> int | None:
    """The size that a step is padded to. None if it cannot be replayed: it prefills, needs logits of other positions
    than each row's last, or has more rows than were captured."""
    num_rows = len(packed.context_lens)
    only_decodes = packed.max_query == 1 and np.array_equal(packed.logit_rows_R, np.arange(num_rows))
    return next((size for size in sizes if size >= num_rows), None) if only_decodes else None


def padded(packed: Packed, size: int) -> Packed:
    num_rows = len(packed.context_lens)
    missing = size - num_rows
    assert missing >= 0, f"{num_rows} rows do not fit {size}"
    assert packed.query_starts == tuple(range(num_rows + 1)), "only steps of one token a row are padded"
    none = (0,) * missing
    return Packed(
        token_ids_T=np.pad(packed.token_ids_T, (0, missing)),
        follows_T=np.pad(packed.follows_T, (0, missing), constant_values=KNOWN),
        positions_T=np.pad(packed.positions_T, (0, missing)),
        logit_rows_R=np.arange(size),
        tables=tuple(
            PackedTables(
                slots_T=np.pad(group.slots_T, (0, missing), constant_values=NOWHERE),
                tables_SB=np.pad(group.tables_SB, ((0, missing), (0, 0))),
            )
            for group in packed.tables
        ),
        query_starts=tuple(range(size + 1)),
        context_lens=packed.context_lens + none,
        prompt_lens=packed.prompt_lens + none,
        max_query=1,
    )


def nothing(size: int, num_groups: int = 1) -> Packed:
    empty = np.zeros(0, dtype=np.int64)
    step = Packed(
        token_ids_T=empty,
        follows_T=empty,
        positions_T=empty,
        logit_rows_R=empty,
        tables=(PackedTables(slots_T=empty, tables_SB=np.zeros((0, 1), dtype=np.int32)),) * num_groups,
        query_starts=(0,),
        context_lens=(),
        prompt_lens=(),
        max_query=1,
    )
    return padded(step, size)
