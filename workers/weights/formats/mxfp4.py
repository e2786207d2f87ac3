"""MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores it: blocks of 32 inputs, two e2m1 codes a byte with the first
in the low bits, and a power of two for each block.

Legend: I inputs, O outputs, G blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from protos.errors import UnsupportedModel
from workers.quantization.quantised_weight import GroupValues, QuantisedWeight
from workers.weights.encoding import WeightEncodings
from workers.weights.formats.quantised_matrix import encodings_where
from workers.weights.formats.stored_tensors import BYTES, StoredTensors
from workers.weights.source import WeightSource

_BLOCK = 32
_BIAS = 127
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encodings(_: None, source: WeightSource) -> WeightEncodings:
    return encodings_where("blocks", source, lambda _: None, lambda stored, _: MXFP4Weight(stored))


class MXFP4Weight:
    """`NAME.blocks` [O, G, 16] and `NAME.scales` [O, G]. Blocks that a rank's inputs cut are read whole."""

    def __init__(self, stored: StoredTensors) -> None:
        self.stored = stored
        share, total = stored.share, stored.share.total_inputs
        if total % _BLOCK:
            raise UnsupportedModel(f"{stored.projection.name} has {total} inputs: MXFP4 needs a multiple of {_BLOCK}")
        end = share.first_input + share.num_inputs
        self._blocks = range(share.first_input // _BLOCK, -(-end // _BLOCK))
        shape = stored.projection.total, total // _BLOCK
        dim, part = (1, self._blocks) if stored.by_inputs else (0, stored.outputs)
        self._codes = stored.tensor("blocks", (*shape, _BLOCK // 2), torch.uint8, BYTES, dim=dim, part=part)
        self._scales = stored.tensor("scales", shape, torch.uint8, BYTES, dim=dim, part=part)

    def weights(self) -> Sequence[QuantisedWeight]:
        share = self.stored.share
        weight = mxfp4_weight(self._codes, self._scales)
        if len(self._blocks) * _BLOCK == share.num_inputs:
            return [weight]
        return [weight.cut_inputs(share.first_input - self._blocks.start * _BLOCK, share.num_inputs)]


def mxfp4_weight(blocks_OGB: torch.Tensor, scales_OG: torch.Tensor) -> QuantisedWeight:
    """uint8 `blocks_OGB` [O, G, 16] and exponents `scales_OG` [O, G], 127 added. Scales are exact in bfloat16."""
    scale = torch.exp2(scales_OG.double() - _BIAS).to(torch.bfloat16)
    return QuantisedWeight(
        bits=4,
        codes_OW=blocks_OGB.flatten(1),
        num_inputs=scales_OG.shape[1] * _BLOCK,
        scale=GroupValues(value_OB=scale),
        group_size=_BLOCK,
        table=_levels(blocks_OGB.device),
    )


@cache
def _levels(device: torch.device) -> torch.Tensor:
    """Copied to the device once: an embedding is looked up in recorded CUDA graphs, too, which take no copy."""
    return torch.tensor([*_LEVELS, *(-level for level in _LEVELS)], device=device)
