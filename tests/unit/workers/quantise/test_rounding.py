"""Rounding to nearest is compressed-tensors' rule; GPTQ and AWQ lose less of the outputs than it does."""

from __future__ import annotations

import pytest
import torch

from workers.quantise.awq_scales import InputSample, clipped_scales, fold_scales
from workers.quantise.gptq_levels import SecondMoments, gptq_levels
from workers.quantization.quantised_weight import QuantisedWeight
from workers.weights.group_rounding import GroupRounding, fp8_rows


def correlated(num_tokens: int, num_inputs: int) -> torch.Tensor:
    """Inputs of a few directions with uneven sizes, as after a norm."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(num_tokens, num_inputs // 4, generator=generator) @ torch.randn(
        num_inputs // 4, num_inputs, generator=generator
    )
    return mixed * torch.logspace(-1, 1, num_inputs)[torch.randperm(num_inputs, generator=generator)]


def random_weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))


def error(x_TI: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((x_TI @ (weight - rounded).T).square().sum())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_nearest_is_compressed_tensors_rule(bits: int, dtype: torch.dtype) -> None:
    """absmax / (bit_range / 2), and not absmax / (2**(bits - 1) - 1)."""
    weight, half = random_weight(6, 80), 2 ** (bits - 1)
    made = GroupRounding(bits=bits, group_size=32).quantised(weight, dtype)
    dequantised = made.dequantised()
    for row in range(6):
        for first in range(0, 80, 32):
            part = weight[row, first : first + 32]
            scale = (part.abs().max() / ((2 * half - 1) / 2)).to(dtype).float()
            wanted = (part / scale).round().clamp(-half, half - 1) * scale
            assert torch.equal(dequantised[row, first : first + 32], wanted)
    assert made.scale.value_OB.dtype == dtype


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 256), (7, 131)])
def test_compiled_rounding_has_the_bits_of_torchs(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, shape: tuple[int, int]
) -> None:
    """Ties, groups of zeros, subnormal numbers, groups and rows that are not full."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.logspace(-9, 4, shape[0]).unsqueeze(1)
    weight = torch.randn(shape, generator=generator) * sizes
    weight[::3] = torch.randint(-15, 16, shape, generator=generator)[::3] / 2
    weight[1, :128] = 0
    weight = weight.to(stored)

    def made() -> list[QuantisedWeight]:
        integers = [GroupRounding(bits=bits, group_size=128).quantised(weight, torch.bfloat16) for bits in (3, 4, 8)]
        return [*integers, fp8_rows(weight, torch.bfloat16)]

    compiled = made()
    monkeypatch.setattr("workers.weights.group_rounding.can_round", lambda _: False)
    for ours, torchs in zip(compiled, made(), strict=True):
        assert torch.equal(ours.codes_OW, torchs.codes_OW)
        assert torch.equal(ours.scale.value_OB, torchs.scale.value_OB)


def test_a_group_of_zeros_stays_zero() -> None:
    made = GroupRounding(bits=4, group_size=32).quantised(torch.zeros(2, 64), torch.bfloat16)
    assert torch.equal(made.dequantised(), torch.zeros(2, 64))


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_loses_less_than_rounding_to_nearest(bits: int) -> None:
    x_TI, weight, rounding = correlated(600, 160), random_weight(24, 160), GroupRounding(bits=bits, group_size=32)
    moments = SecondMoments(160)
    for part in x_TI.split(100):
        moments.add(part)
    scale_OG = rounding.scales(weight, torch.float32)
    levels = gptq_levels(weight, moments.moments_II, rounding, scale_OG)
    assert torch.equal(levels, levels.round())
    assert float(levels.min()) >= -rounding.zero
    assert float(levels.max()) < rounding.zero
    compensated = levels * rounding.spread(scale_OG, 160)
    assert error(x_TI, weight, compensated) < 0.5 * error(x_TI, weight, rounding.rounded(weight))


def test_gptq_rounds_unreached_weights_to_nearest() -> None:
    x_TI, weight, rounding = correlated(600, 64), random_weight(8, 64), GroupRounding(bits=4, group_size=32)
    x_TI[:, 5] = 0.0
    moments = SecondMoments(64)
    moments.add(x_TI)
    scale_OG = rounding.scales(weight, torch.float32)
    levels = gptq_levels(weight, moments.moments_II, rounding, scale_OG)
    assert torch.equal(levels[:, 5], rounding.levels(weight, rounding.spread(scale_OG, 64))[:, 5])


def test_awq_loses_less_than_rounding_to_nearest() -> None:
    x_TI, rounding, layer = correlated(600, 128), GroupRounding(bits=4, group_size=32), "model.layers.0"
    weights = {f"{layer}.mlp.{name}.weight": random_weight(24, 128) for name in ("gate_proj", "up_proj")}
    norm = torch.ones(128)
    tensors = {f"{layer}.post_attention_layernorm.weight": norm, **weights}
    before = {name: weight.clone() for name, weight in weights.items()}
    sample = InputSample(128)
    sample.add(x_TI)
    fold_scales(layer, tensors, {(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"): sample}, lambda _: rounding)
    for name, weight in weights.items():
        torch.testing.assert_close(weight * norm, before[name])
        scale_OG = clipped_scales(weight, sample.rows(), rounding, torch.float32)
        rounded = rounding.rounded(weight, scale_OG) * norm
        assert error(x_TI, before[name], rounded) < 0.7 * error(x_TI, before[name], rounding.rounded(before[name]))


def test_awq_skips_inputs_whose_producer_has_other_outputs() -> None:
    layer, sample = "model.layers.0", InputSample(64)
    sample.add(correlated(100, 64))
    tensors = {
        f"{layer}.self_attn.{name}.weight": random_weight(rows, 64) for name, rows in (("o_proj", 64), ("v_proj", 32))
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    observed: dict[tuple[str, ...], InputSample] = {(f"{layer}.self_attn.o_proj",): sample}
    fold_scales(layer, tensors, observed, lambda _: GroupRounding(bits=4, group_size=32))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
