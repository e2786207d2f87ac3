"""The interface between the decoder stack and the attention backends.

Legend of shape suffixes: T tokens of the batch (rows packed, never padded), S sequences (rows), B blocks of the longest
sequence, N query heads, K key/value heads, D head dim, both of this rank. The cache is a
`workers.kv.kv_storage.KVStorage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of the step's tokens, each [T, D / 2] in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTables:
    """The positions of a step's tokens in the blocks of one `protos.values.KVGroup`."""

    slots_T: torch.Tensor  # int64, block id * block size + offset: where the token's keys and values are written
    block_tables_SB: torch.Tensor  # int32, padded with 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """The positions of a step's tokens. Made once per step, before the first layer."""

    positions_T: torch.Tensor  # int64
    query_starts: tuple[int, ...]  # S + 1 offsets into T
    context_lens: tuple[int, ...]  # S, tokens visible to the row's last token, including itself
    tables: tuple[GroupTables, ...]  # one per group of the layout
    max_query: int  # over the rows, on the host
    max_context: int
    has_prompts: bool = True  # a row computes positions of a prompt; False: rows decode, some perhaps with drafts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """How a layer attends, the same in every step.

    A `softcap` above 0 replaces each score s by softcap * tanh(s / softcap) before the mask (Gemma 2,
    https://arxiv.org/abs/2408.00118, 2). `sinks_N`, float32, are one more logit for each query head in the softmax,
    which has no value (gpt-oss). `value_dim`: the cache keeps latents, and the first so many elements of a key are its
    value.
    """

    scale: float  # of scores
    window: int | None  # tokens, the token itself included
    softcap: float = 0.0
    sinks_N: torch.Tensor | None = None
    value_dim: int | None = None


class AttentionBackend(Protocol):
    """An attention backend. `begin` is called once per step, then for each layer `write` before `attend`."""

    def begin(self, inputs: AttentionInputs) -> None: ...

    def write(
        self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: CosSin
    ) -> torch.Tensor:
        """Rotates queries and keys, and writes keys and values to their slots of the cache. Returns the rotated
        queries. This is a single call, so that one kernel can do all of it. The inputs may be views into one tensor and
        stay as they are.

        Where the cache keeps latents, `k_TKD` is the latent, of one head, and `v_TKD` its first elements. Only the last
        2 P dimensions of queries and latents are rotated."""
        ...

    def attend(self, layer: int, q_TND: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Causal attention of each row over its own context in the cache. Returns [T, N, D] in q's dtype; of latents
        [T, N, value_dim]."""
        ...
