"""The seam between the decoder stack and the attention backends of this machine.

Legend of shape suffixes: T tokens of the batch (rows packed, never padded), S sequences (rows), B blocks of the longest
sequence, N query heads, K key/value heads, D head dim, both of this rank. The cache is `workers.kv.storage.KVStorage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of the step's tokens, each [T, D / 2] in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTables:
    """Where a step's tokens lie in the blocks of one `protos.values.KVGroup`."""

    slots_T: torch.Tensor  # int64, block id * block size + offset: where the token's keys and values are written
    block_tables_SB: torch.Tensor  # int32, padded with 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Where each token of the step stands. Made once a step, before the first layer."""

    positions_T: torch.Tensor  # int64
    query_starts: tuple[int, ...]  # S + 1 offsets into T
    context_lens: tuple[int, ...]  # S, tokens visible to the row's last token, itself included
    tables: tuple[GroupTables, ...]  # one for each group of the layout
    max_query: int  # over the rows, on the host
    max_context: int


class AttentionBackend(Protocol):
    """Three methods. `begin` once a step, then for each layer `write` before `attend`."""

    def begin(self, inputs: AttentionInputs) -> None: ...

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        """Turns queries and keys, and puts keys and values into the cache at their slots. Returns the turned queries.

        One call, so that one kernel can do all of it. The inputs may be views into one tensor and stay as they are.
        """
        ...

    def attend(self, layer: int, q_TND: torch.Tensor, *, scale: float, window: int | None) -> torch.Tensor:
        """Causal attention of each row over its own context in the cache; `window` counts the token itself.
        Returns [T, N, D] in q's dtype."""
        ...
