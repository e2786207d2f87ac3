"""A packed batch as a model's inputs on its device."""

from __future__ import annotations

import numpy as np
import torch

from workers.attention.backend import AttentionInputs, GroupTables
from workers.kernels.this_device import to_device
from workers.models.decoder import ModelInputs, Taps
from workers.runner.packed_batch import Packed


def model_inputs(packed: Packed, device: str, sampled_R: torch.Tensor, taps: Taps | None = None) -> ModelInputs:
    """The inputs on the device, with the tokens `sampled_R` that the previous step sampled there."""
    numbers = packed.token_ids_T, packed.follows_T, packed.positions_T, *(group.slots_T for group in packed.tables)
    token_ids_T, follows_T, positions_T, *slots = to_device(np.stack(numbers), device)
    if packed.follows_T.max() >= 0:
        token_ids_T = torch.where(follows_T < 0, token_ids_T, sampled_R[follows_T.clamp(min=0)])
    return ModelInputs(
        token_ids_T=token_ids_T,
        attention=AttentionInputs(
            positions_T=positions_T,
            query_starts=packed.query_starts,
            context_lens=packed.context_lens,
            tables=tuple(
                GroupTables(slots_T=slots_T, block_tables_SB=to_device(group.tables_SB, device))
                for slots_T, group in zip(slots, packed.tables, strict=True)
            ),
            max_query=packed.max_query,
            max_context=max(packed.context_lens),
            has_prompts=packed.has_prompts,
        ),
        logit_rows=to_device(packed.logit_rows_R, device),
        prompt_lens=packed.prompt_lens,
        pooled_rows=to_device(packed.pooled_rows_P, device) if len(packed.pooled_rows_P) else None,
        taps=taps or Taps(),
    )
