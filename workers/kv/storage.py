"""The tensors behind the block ids: one rank's share of a worker's KV cache. Who owns which block is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protos.values import KVLayout
from workers.kernels.base import kernels_for

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class KVStorage:
    """Keys and values of one rank, [layers, 2, blocks, heads, block size, head dim].

    Heads stand before positions: a range of a block's heads, which is what a worker with another degree of tensor
    parallelism needs, is contiguous. Zeroed at the start, so that what was never written is finite.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_heads = heads_of_rank(layout)
        self._kernels = kernels_for(device)
        self.data = torch.zeros(
            (layout.num_layers, 2, num_blocks, self.num_heads, layout.block_size, layout.head_dim),
            dtype=DTYPES[layout.dtype],
            device=device,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.num_bytes // self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, heads, block size, head dim], a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        return self.data[layer, 1]

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        """A contiguous copy of the blocks: [layers, 2, len(block_ids), heads, block size, head dim]."""
        return self._kernels.gather(self.data, self._ids(block_ids))

    def scatter(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        """Writes what `gather` gave (here or on a worker with the same layout) into other blocks."""
        expected = (*self.data.shape[:2], len(block_ids), *self.data.shape[3:])
        assert payload.shape == expected, f"payload {tuple(payload.shape)} does not fit {expected}"
        assert payload.dtype == self.data.dtype, f"payload is {payload.dtype}, the cache {self.data.dtype}"
        self._kernels.scatter(self.data, self._ids(block_ids), payload.to(self.data.device))

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self.data.device)


def heads_of_rank(layout: KVLayout) -> int:
    """KV heads that each rank holds: its share, or one (a copy) when there are more ranks than heads."""
    return max(1, layout.num_kv_heads // layout.tp)
