"""Sorts the pairs of tokens and slots by expert, so that a tile of a grouped product has one expert's rows.

The rows of each expert begin a new tile; what is left of its last tile is padding in the index, not in memory. All
sizes follow from shapes: nothing waits for the device, and a CUDA graph can hold it.

Legend: P pairs (token * slots + slot), X experts, B tiles, M rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile. 16 are the least that matrix units take: experts with few rows are bound by their bytes. Chosen by
reasoning, not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """The tiles of rows of a step, for all products of a layer."""

    rows: int
    pairs: torch.Tensor  # int32 [B * rows], P where there is none
    experts_B: torch.Tensor  # int32, X for a tile that is not used

    @classmethod
    def of(cls, chosen_P: torch.Tensor, num_experts: int) -> ExpertTiles:
        rows = FEW_ROWS if len(chosen_P) <= FEW_ROWS * num_experts else MANY_ROWS
        pairs, experts_B = aligned_pairs(chosen_P, num_experts, rows)
        return cls(rows=rows, pairs=pairs, experts_B=experts_B)


def aligned_pairs(chosen_P: torch.Tensor, num_experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (pairs int32 [B * M], P for no pair; experts int32 [B], X for an unused tile) of int64 ids."""
    num_pairs, device = len(chosen_P), chosen_P.device
    num_tiles = min(num_pairs, num_experts + num_pairs // tile_rows)
    counts_X = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts_X.scatter_add_(0, chosen_P, torch.ones_like(chosen_P))
    tiles_X = (counts_X + (tile_rows - 1)) // tile_rows
    last_tiles_X = tiles_X.cumsum(0)
    order_P = chosen_P.argsort(stable=True)
    sorted_P = chosen_P[order_P]
    within_P = torch.arange(num_pairs, device=device) - (counts_X.cumsum(0) - counts_X)[sorted_P]
    places_P = (last_tiles_X - tiles_X)[sorted_P] * tile_rows + within_P
    pairs = torch.full((num_tiles * tile_rows,), num_pairs, dtype=torch.int32, device=device)
    pairs[places_P] = order_P.int()
    tiles_B = torch.arange(num_tiles, device=device)
    return pairs, torch.searchsorted(last_tiles_X, tiles_B, right=True).int()
