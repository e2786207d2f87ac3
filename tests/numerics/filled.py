"""Random numbers, and caches filled with them, for the tests of the CPU's kernels."""

from __future__ import annotations

import torch

from protos.values import KVLayout
from workers.attention.backend import AttentionInputs, GroupTables
from workers.kv.kv_storage import KVStorage

ROWS = ((1, 0), (1, 63), (1, 64), (1, 200), (70, 0), (37, 130), (1, 5))
"""(tokens computed now, tokens in the cache before): rows that decode and rows of prompts, on both sides of a chunk."""


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(layout: KVLayout, rows: tuple[tuple[int, int], ...]) -> tuple[KVStorage, AttentionInputs]:
    """A cache whose pages lie in no order, NaN wherever no row may look."""
    lens = [new + cached for new, cached in rows]
    counts = [-(-length // layout.block_size) for length in lens]
    generator = torch.Generator().manual_seed(11)
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    storage = KVStorage(layout, num_blocks=len(order))
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    for tensor in storage.tensors:
        if not tensor.dtype.is_floating_point:
            drawn = torch.randint(-127, 127, tensor.shape, generator=generator)
            tensor.copy_(drawn.masked_fill_(drawn == -1, 0))  # the byte 255 is NaN in fp8
            continue
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        tensor[:, :, order] = float("nan")
        for length, table in zip(lens, blocks, strict=True):
            tensor[:, :, table[-1], :, (length - 1) % layout.block_size + 1 :] = float("nan")
    starts: list[int] = [0]
    positions: list[int] = []
    for new, cached in rows:
        starts.append(starts[-1] + new)
        positions += range(cached, cached + new)
    tables = [torch.tensor(table, dtype=torch.int32) for table in blocks]
    return storage, AttentionInputs(
        positions_T=torch.tensor(positions),
        query_starts=tuple(starts),
        context_lens=tuple(lens),
        tables=(
            GroupTables(
                slots_T=torch.zeros(starts[-1], dtype=torch.int64),
                block_tables_SB=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            ),
        ),
        max_query=max(new for new, _ in rows),
        max_context=max(lens),
    )
