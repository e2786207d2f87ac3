"""Rope fused with the write into the cache: what is turned, what lands where, and that nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import DEVICE, assert_near, normal
from workers.kernels import twins
from workers.kernels.rope_kv_write import rope_kv_write


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "block_size"),
    [(4, 2, 64, 16), (12, 2, 128, 16), (3, 3, 80, 7), (1, 1, 8, 1), (20, 10, 32, 32)],
)
def test_tokens_land_turned_in_their_slots(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, block_size: int
) -> None:
    """q, k and v are views into one projection's output, the caches one layer of many, slot -1 is padding."""
    num_tokens, num_blocks = 5, 12
    sizes = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
    parts = torch.split(normal(num_tokens, sum(sizes), dtype=dtype), sizes, dim=1)
    q_TND, k_TKD, v_TKD = (part.view(num_tokens, -1, dim) for part in parts)
    angles_TP = normal(num_tokens, dim // 2, dtype=torch.float32, seed=1) * 10
    before = normal(2, 2, num_blocks, num_kv_heads, block_size, dim, dtype=dtype, seed=2)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    slots[2] = -1
    after = before.clone()
    turned_TND = rope_kv_write(
        q_TND, k_TKD, v_TKD, angles_TP.cos(), angles_TP.sin(), after[1, 0], after[1, 1], slots.to(DEVICE)
    )

    written, exact = slots >= 0, before.double().cpu()
    cos_TP, sin_TP = angles_TP.double().cos().cpu(), angles_TP.double().sin().cpu()
    k_exact = turned(k_TKD.double().cpu(), cos_TP, sin_TP)[written]
    twins.kv_write(k_exact, v_TKD.double().cpu()[written], exact[1, 0], exact[1, 1], slots[written])
    assert_near(turned_TND, turned(q_TND.double().cpu(), cos_TP, sin_TP))
    assert_near(after, exact)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1, 1].cpu(), exact[1, 1].to(dtype))
    assert turned_TND.is_contiguous()


def turned(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """In float64: the pairs (i, i + D / 2) as complex numbers."""
    first_THP, second_THP = x_THD.chunk(2, dim=-1)
    pairs_THP = torch.complex(first_THP, second_THP) * torch.complex(cos_TP, sin_TP).unsqueeze(1)
    return torch.cat((pairs_THP.real, pairs_THP.imag), dim=-1)


def test_it_rounds_as_its_twin_does(dtype: torch.dtype) -> None:
    """Both compute in float32, so that both backends can write one cache."""
    q_TND, k_TKD, v_TKD = (normal(6, heads, 64, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    angles_TP, slots_T = normal(6, 32, dtype=torch.float32), torch.arange(6, device=DEVICE)
    results = []
    for write in (rope_kv_write, twins.rope_kv_write):
        caches = torch.zeros(2, 1, 2, 16, 64, dtype=dtype, device=DEVICE)
        turned_TND = write(q_TND, k_TKD, v_TKD, angles_TP.cos(), angles_TP.sin(), caches[0], caches[1], slots_T)
        results.append((turned_TND, caches))
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(*results, rtol=ulp, atol=ulp)


def test_no_tokens_are_no_launch() -> None:
    q_TND = torch.empty(0, 4, 64, device=DEVICE)
    caches = torch.zeros(2, 3, 2, 16, 64, device=DEVICE)
    slots_T = torch.empty(0, dtype=torch.int64, device=DEVICE)
    angles_TP = torch.empty(0, 32, device=DEVICE)
    empty = rope_kv_write(q_TND, q_TND[:, :2], q_TND[:, :2], angles_TP, angles_TP, caches[0], caches[1], slots_T)
    assert empty.shape == q_TND.shape


def test_a_layout_it_cannot_read_is_refused() -> None:
    x_TKD, angles_TP = normal(3, 2, 64, dtype=torch.float32), torch.zeros(3, 32, device=DEVICE)
    cache, slots_T = torch.zeros(3, 2, 16, 64, device=DEVICE), torch.arange(3, device=DEVICE)
    positions_first = torch.zeros(3, 16, 2, 64, device=DEVICE).transpose(1, 2)
    with pytest.raises(AssertionError, match="cached keys have strides"):
        rope_kv_write(x_TKD, x_TKD, x_TKD, angles_TP, angles_TP, positions_first, cache, slots_T)
    with pytest.raises(AssertionError, match=r"k is torch\.float16, the cache torch\.float32"):
        rope_kv_write(x_TKD, x_TKD.half(), x_TKD, angles_TP, angles_TP, cache, cache, slots_T)
    with pytest.raises(AssertionError, match="q has strides"):
        rope_kv_write(x_TKD.mT.contiguous().mT, x_TKD, x_TKD, angles_TP, angles_TP, cache, cache, slots_T)
