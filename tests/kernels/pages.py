"""Rows over scattered pages for the attention kernels. What no row may see is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from tests.kernels.conftest import DEVICE, normal
from workers.kernels import twins


class Pages:
    """Rows of (tokens now, context with them). The cache is a part of a larger one, as a layer's is."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype,
        block_size: int = 16,
        num_kv_heads: int = 2,
        group: int = 4,
        dim: int = 64,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-context // block_size) for _, context in rows]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        layers = normal(2, 2, len(order), num_kv_heads, block_size, dim, dtype=dtype, seed=seed)
        self.k_cache, self.v_cache = layers[1]
        tables = [[order.pop() for _ in range(count)] for count in counts]
        seen = torch.zeros(len(layers[1, 0]), block_size, dtype=torch.bool)
        for (_, context), table in zip(rows, tables, strict=True):
            for position in range(context):
                seen[table[position // block_size], position % block_size] = True
        hidden = (~seen).to(DEVICE)[:, None, :, None].expand_as(self.k_cache)
        self.k_cache[hidden] = float("nan")
        self.v_cache[hidden] = float("nan")
        widest = max(1, *counts) + 1  # wider than it must be, as a CUDA graph's is
        padded = [table + [0] * (widest - len(table)) for table in tables]
        self.block_tables_SB = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
        self.query_starts = tuple(torch.tensor([0] + [count for count, _ in rows]).cumsum(0).tolist())
        self.context_lens = tuple(context for _, context in rows)
        self.group, self.num_kv_heads = group, num_kv_heads
        self.q_TND = normal(self.query_starts[-1], num_kv_heads * group, dim, dtype=dtype, seed=seed + 1)

    def poisoned(self) -> torch.Tensor:
        """An output filled with a value that shows unwritten places."""
        return torch.full_like(self.q_TND, float("nan"))

    def exact(
        self, *, scale: float, window: int | None, softcap: float = 0.0, sinks_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, N, D] in float64. Rows with a token but no context must stand last, as padding does: zeros."""
        num_rows = sum(1 for length in self.context_lens if length) + sum(
            1 for start, stop in pairwise(self.query_starts) if start == stop
        )
        num_tokens = self.query_starts[num_rows]
        out_TND = torch.zeros(self.q_TND.shape, dtype=torch.float64)
        out_TND[:num_tokens] = twins.paged_attention(
            self.q_TND[:num_tokens].double().cpu(),
            self.k_cache.double().cpu(),
            self.v_cache.double().cpu(),
            query_starts=self.query_starts[: num_rows + 1],
            context_lens=self.context_lens[:num_rows],
            block_tables_SB=self.block_tables_SB.cpu(),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_N=None if sinks_N is None else sinks_N.cpu(),
        )
        return out_TND
