"""MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores it: blocks of 32 inputs, two e2m1 codes a byte with the first
in the low bits, and a power of two for each block. Its experts are not served yet; the decoder is for them.

Legend: I inputs, O outputs, G blocks.
"""

from __future__ import annotations

import torch

from workers.checkpoint.quantised import GroupValues, QuantisedWeight

_BLOCK = 32
_BIAS = 127
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_weight(blocks_OGB: torch.Tensor, scales_OG: torch.Tensor) -> QuantisedWeight:
    """uint8 `blocks_OGB` [O, G, 16] and exponents `scales_OG` [O, G], 127 added. Scales are exact in bfloat16."""
    levels = torch.tensor([*_LEVELS, *(-level for level in _LEVELS)], device=blocks_OGB.device)
    scale = torch.exp2(scales_OG.double() - _BIAS).to(torch.bfloat16)
    return QuantisedWeight(
        bits=4,
        codes_OW=blocks_OGB.flatten(1),
        num_inputs=scales_OG.shape[1] * _BLOCK,
        scale=GroupValues(value_OB=scale),
        group_size=_BLOCK,
        table=levels,
    )
