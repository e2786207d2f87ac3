"""Grouped products of experts against a loop over tokens and slots in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import DEVICE, assert_near, normal
from workers.kernels.experts.alignment import aligned_pairs
from workers.kernels.experts.product import GroupedExperts
from workers.kernels.silu_mul import silu_mul


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
    """The last expert is another rank's; one token's weights are NaN; each expert has a bias where there are few."""
    hidden, width, biased = 72, 40, num_experts < 7
    own = range(num_experts - (num_experts > 2))
    gate_up = {one: normal(2 * width, hidden, dtype=dtype, seed=one) * hidden**-0.5 for one in own}
    down = {one: normal(hidden, width, dtype=dtype, seed=9 + one) * width**-0.5 for one in own}
    first = {one: normal(2 * width, dtype=dtype, seed=20 + one) for one in own} if biased else None
    second = {one: normal(hidden, dtype=dtype, seed=30 + one) for one in own} if biased else None
    x_TE = normal(num_tokens, hidden, dtype=dtype, seed=40)
    scores = normal(num_tokens, num_experts, dtype=torch.float32, seed=41)
    weights_TS, chosen_TS = (part.to(DEVICE) for part in scores.topk(slots, dim=1))
    layer = GroupedExperts(gate_up, down, silu_mul, num_experts=num_experts, gate_up_biases=first, down_biases=second)
    if num_tokens > 1:
        weights_TS[1] = torch.nan
    out_TE = layer(x_TE, chosen_TS, weights_TS)
    exact = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for token in range(num_tokens):
        for slot in range(slots):
            if (one := int(chosen_TS[token, slot])) not in own:
                continue
            wide = gate_up[one].double().cpu() @ x_TE[token].double().cpu()
            wide = wide + first[one].double().cpu() if first else wide
            inner = torch.nn.functional.silu(wide[:width]) * wide[width:]
            made = down[one].double().cpu() @ inner
            exact[token] += float(weights_TS[token, slot]) * (made + second[one].double().cpu() if second else made)
    for token in range(num_tokens):
        if bool(weights_TS[token].isnan().any()):
            assert out_TE[token].isnan().all()
        else:
            assert_near(out_TE[token].to(dtype), exact[token])
