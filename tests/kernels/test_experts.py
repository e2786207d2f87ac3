"""Grouped products of experts, in floating point and quantised, against a loop over tokens and slots in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

from tests.kernels.conftest import DEVICE, assert_near, normal
from tests.kernels.test_quantised import NARROW, weight_of
from workers.kernels.device_kernels import QuantisedProduct
from workers.kernels.experts.address_tables import addresses
from workers.kernels.experts.alignment import ExpertTiles, aligned_pairs
from workers.kernels.experts.grouped_experts import _matrices, grouped_experts
from workers.kernels.quantised.product_choice import quantised_product
from workers.kernels.silu_mul import silu_mul
from workers.quantization.activation_rounding import ActivationRounding
from workers.quantization.quantised_weight import QuantisedWeight
from workers.weights.formats.quantised_matrix import product


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "tile_rows"), [(1, 5, 16), (40, 5, 16), (90, 2, 16), (64, 64, 16)]
)
def test_every_pair_is_in_a_tile_of_its_expert(num_pairs: int, num_experts: int, tile_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    chosen_P = torch.randint(0, num_experts, (num_pairs,), generator=generator).to(DEVICE)
    pairs, experts_B = aligned_pairs(chosen_P, num_experts, tile_rows)
    assert len(pairs) == len(experts_B) * tile_rows
    seen = []
    for tile, expert in zip(pairs.view(-1, tile_rows).tolist(), experts_B.tolist(), strict=True):
        here = [pair for pair in tile if pair < num_pairs]
        seen += here
        assert all(int(chosen_P[pair]) == expert for pair in here)
        assert bool(here) == (expert < num_experts), "a tile that is not used has no expert"
    assert sorted(seen) == list(range(num_pairs))


@pytest.mark.parametrize(("num_tokens", "slots", "num_experts"), [(1, 3, 7), (9, 2, 5), (40, 2, 2)])
def test_the_sum_of_each_tokens_experts(num_tokens: int, slots: int, num_experts: int, dtype: torch.dtype) -> None:
    """The last expert is on another rank; one token's weights are NaN."""
    hidden, width, biased = 72, 40, num_experts < 7
    own = range(num_experts - (num_experts > 2))
    gate_up = {expert: normal(2 * width, hidden, dtype=dtype, seed=expert) * hidden**-0.5 for expert in own}
    down = {expert: normal(hidden, width, dtype=dtype, seed=9 + expert) * width**-0.5 for expert in own}
    first = {expert: normal(2 * width, dtype=dtype, seed=20 + expert) for expert in own} if biased else None
    second = {expert: normal(hidden, dtype=dtype, seed=30 + expert) for expert in own} if biased else None
    x_TE = normal(num_tokens, hidden, dtype=dtype, seed=40)
    scores = normal(num_tokens, num_experts, dtype=torch.float32, seed=41)
    weights_TS, chosen_TS = (part.to(DEVICE) for part in scores.topk(slots, dim=1))
    layer = grouped_experts(gate_up, down, silu_mul, num_experts=num_experts, gate_up_biases=first, down_biases=second)
    assert layer is not None
    if num_tokens > 1:
        weights_TS[1] = torch.nan
    out_TE = layer(x_TE, chosen_TS, weights_TS)
    exact = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for token in range(num_tokens):
        for slot in range(slots):
            if (expert := int(chosen_TS[token, slot])) not in own:
                continue
            wide = gate_up[expert].double().cpu() @ x_TE[token].double().cpu()
            wide = wide + first[expert].double().cpu() if first else wide
            inner = torch.nn.functional.silu(wide[:width]) * wide[width:]
            made = down[expert].double().cpu() @ inner
            exact[token] += float(weights_TS[token, slot]) * (made + second[expert].double().cpu() if second else made)
    for token in range(num_tokens):
        if bool(weights_TS[token].isnan().any()):
            assert out_TE[token].isnan().all()
        else:
            assert_near(out_TE[token].to(dtype), exact[token])


FORMS: dict[str, Callable[[int], QuantisedWeight]] = {
    "4 bits, a zero each": lambda seed: weight_of(zeros=True, group=32, outputs=70, seed=seed),
    "4 bits, in an order": lambda seed: ordered(weight_of(zeros=True, group=64, seed=seed), seed),
    "Q4_K": lambda seed: replace(weight_of(group=32, factors=8, minimums=True, seed=seed), zero=0),
    "Q6_K": lambda seed: replace(weight_of(bits=6, group=16, factors=16, seed=seed), zero=32),
    "8 bits": lambda seed: weight_of(bits=8, group=32, seed=seed),
    "table of 16": lambda seed: weight_of(group=64, table=True, seed=seed),
    "int8 inputs": lambda seed: in_bytes("int8", seed),
    "fp8 blocks": lambda seed: in_bytes("fp8", seed),
}


def ordered(weight: QuantisedWeight, seed: int) -> QuantisedWeight:
    """Gives each expert its own order."""
    order_I = torch.randperm(weight.num_inputs, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return replace(weight, order_I=order_I)


def in_bytes(levels: Literal["int8", "fp8"], seed: int, **rounding: Any) -> QuantisedWeight:
    if levels == "int8":
        weight = weight_of(bits=8, group=256, seed=seed)
        return replace(weight, activations=ActivationRounding(levels="int8", **rounding))
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(DEVICE)
    weight = weight_of(bits=8, table=True, seed=seed)
    codes_OI = torch.where(weight.codes_OW & 0x7F == 0x7F, 0, weight.codes_OW)  # no NaN
    return replace(weight, codes_OW=codes_OI, table=table, activations=ActivationRounding(levels="fp8", group=128))


def kernel_of(weight: QuantisedWeight) -> QuantisedProduct:
    made = quantised_product(weight)
    assert made is not None
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [5, 80])
def test_each_pair_has_the_product_with_its_own_expert(form: str, num_tokens: int) -> None:
    """The last expert is on another rank. Tiles have few rows, and many."""
    slots, num_experts = 2, 3
    weights = {expert: FORMS[form](expert) for expert in range(num_experts - 1)}
    biases = {expert: normal(70, dtype=NARROW, seed=expert) for expert in weights}
    matrices = _matrices({expert: kernel_of(weight) for expert, weight in weights.items()}, num_experts)
    assert matrices is not None
    x_TI = normal(num_tokens, 256, dtype=NARROW, seed=7)
    chosen_P = torch.randint(0, num_experts, (num_tokens * slots,), generator=torch.Generator().manual_seed(3))
    tiles = ExpertTiles.of(chosen_P.to(DEVICE), num_experts)
    assert tiles.rows == (16 if num_tokens == 5 else 64)
    out_PO = torch.full((num_tokens * slots, 70), 7.0, dtype=NARROW, device=DEVICE)
    matrices.multiply(x_TI, slots, tiles, addresses(biases, num_experts), out_PO)
    for expert in range(num_experts):
        pairs = (chosen_P == expert).nonzero().flatten().to(DEVICE)
        if expert not in weights:
            assert (out_PO[pairs] == 7.0).all()
            continue
        exact_TO = product(weights[expert], x_TI[pairs // slots], biases[expert].float())
        loose = 10 if form.startswith("table") else 1  # its levels are rounded to the type
        tolerance = 4 * torch.finfo(NARROW).eps * loose
        torch.testing.assert_close(out_PO[pairs].float(), exact_TO, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("down", ["4 bits, a zero each", "float"])
def test_the_sum_of_each_tokens_quantised_experts(down: str) -> None:
    width, num_experts, slots = 80, 4, 2
    first = {number: weight_of(outputs=2 * width, group=32, zeros=True, seed=number) for number in range(num_experts)}
    second = {number: weight_of(outputs=256, inputs=width, group=16, seed=9 + number) for number in range(num_experts)}
    floats = {value: weight.dequantised().to(NARROW) for value, weight in second.items()}
    layer = grouped_experts(
        {value: kernel_of(weight) for value, weight in first.items()},
        floats if down == "float" else {value: kernel_of(weight) for value, weight in second.items()},
        silu_mul,
        num_experts=num_experts,
    )
    assert layer is not None
    x_TE = normal(6, 256, dtype=NARROW, seed=40)
    scores = normal(6, num_experts, dtype=torch.float32, seed=41)
    weights_TS, chosen_TS = (part.to(DEVICE) for part in scores.softmax(1).topk(slots, dim=1))
    exact = torch.zeros(6, 256, dtype=torch.float64, device=DEVICE)
    for token in range(6):
        for slot in range(slots):
            expert = int(chosen_TS[token, slot])
            wide = first[expert].dequantised().double() @ x_TE[token].double()
            inner = torch.nn.functional.silu(wide[:width]) * wide[width:]
            exact[token] += float(weights_TS[token, slot]) * (second[expert].dequantised().double() @ inner)
    assert_near(layer(x_TE, chosen_TS, weights_TS).to(NARROW), exact)


def test_weights_without_a_kernel_use_the_experts_own_products() -> None:
    """Two forms, an input scale of each expert, and torch's products."""
    four, eight = weight_of(outputs=64), weight_of(outputs=64, bits=8)
    static = {number: in_bytes("int8", number, scale=0.01 * (1 + number)) for number in range(2)}
    others: list[dict[int, Any]] = [
        {0: kernel_of(four), 1: kernel_of(eight)},
        {0: kernel_of(four), 1: four.dequantised()},
        {value: kernel_of(weight) for value, weight in static.items()},
        {0: partial(product, four), 1: partial(product, four)},
    ]
    for weights in others:
        assert grouped_experts(weights, weights, silu_mul, num_experts=2) is None
