"""MXFP4's decoder against the format's rules, value by value, and a product with a decoded weight."""

from __future__ import annotations

import torch

from workers.weights.formats.mxfp4 import mxfp4_weight
from workers.weights.formats.quantised_matrix import product

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_values_are_signed_levels_times_a_power_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 250, (6, 3), generator=generator).to(torch.uint8)
    scales[0, 0], scales[1, 1] = 0, 250
    weight = mxfp4_weight(blocks, scales)
    whole = weight.dequantised()
    for row in range(6):
        for column in range(96):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            value = MAGNITUDES[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(whole[row, column]) == value
    assert weight.num_bytes - 16 * 4 <= 1.1 * (blocks.nbytes + scales.nbytes)


def test_a_linear_layer_multiplies_with_it() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (40, 4, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 130, (40, 4), generator=generator).to(torch.uint8)
    weight, x = mxfp4_weight(blocks, scales), torch.randn(5, 128, generator=generator)
    theirs = x.double() @ weight.dequantised().double().T
    assert (product(weight, x).double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    cut = weight.cut_inputs(32, 64).outputs(slice(3, 10))
    assert torch.equal(cut.dequantised(), weight.dequantised()[3:10, 32:96])
