"""Keys and values of 8 bits: written with the bits of the twin, read as float64 reads what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.conftest import DEVICE, assert_near, normal
from tests.kernels.pages import Pages
from workers.kernels import twins
from workers.kernels.device_kernels import KVScales
from workers.kernels.paged_decode import DecodePlan, paged_decode, plan_decode
from workers.kernels.prefill import PrefillPlan, plan_prefill, prefill
from workers.kernels.rope_kv_write import rope_kv_write
from workers.kernels.tile import Tile

KINDS = (torch.int8, torch.float8_e4m3fn)
SMALL = Tile(rows=32, positions=16, warps=2, stages=2)


class RoundedPages(Pages):
    """Pages whose unread places have scales of NaN, or large numbers in e4m3. `k_cache` and `v_cache` are the values
    that the stored keys and values stand for."""

    def __init__(self, rows: list[tuple[int, int]], kind: torch.dtype, **shape: Any) -> None:
        super().__init__(rows, **shape)
        self.scales: KVScales
        if kind == torch.int8:
            (keys, k_scales), (values, v_scales) = (twins.to_int8(part) for part in (self.k_cache, self.v_cache))
            self.stored, self.scales = (keys, values), (k_scales, v_scales)
        else:
            generator = torch.Generator().manual_seed(1)
            k_scales, v_scales = (torch.rand(2, self.num_kv_heads, generator=generator) / 8 + 0.01).to(DEVICE)
            self.stored = self._in_fp8(self.k_cache, k_scales), self._in_fp8(self.v_cache, v_scales)
            self.scales = k_scales, v_scales
        self.k_cache, self.v_cache = (
            twins.widened(part, scale) for part, scale in zip(self.stored, self.scales, strict=True)
        )

    @staticmethod
    def _in_fp8(cache: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
        rounded = twins.to_fp8(cache.transpose(1, 2), scale_K).transpose(1, 2).view(torch.uint8)
        return torch.empty(cache.shape, dtype=torch.uint8, device=cache.device).copy_(rounded).view(torch.float8_e4m3fn)

    def decoded(self, *, window: int | None = None, tile: Tile | None = None, **options: Any) -> torch.Tensor:
        arrays = plan_decode(
            range(len(self.context_lens)), self.query_starts, self.context_lens,
            window=window, num_kv_heads=self.num_kv_heads, num_multiprocessors=4, min_item=64,
        )  # fmt: skip
        items_W6, parts_R3 = (torch.from_numpy(array).to(DEVICE) for array in arrays)
        plan, out_TND = DecodePlan(items_W6=items_W6, parts_R3=parts_R3), self.poisoned()
        paged_decode(
            self.q_TND, *self.stored, out_TND, self.block_tables_SB,
            plan=plan, scale=0.3, window=window, scales=self.scales, tile=tile, **options,
        )  # fmt: skip
        return out_TND

    def prefilled(self, *, window: int | None = None, **options: Any) -> torch.Tensor:
        rows = range(len(self.context_lens))
        work_W4 = plan_prefill(rows, self.query_starts, self.context_lens, group=self.group, tile=SMALL)
        plan, out_TND = PrefillPlan(work_W4=torch.from_numpy(work_W4).to(DEVICE), tile=SMALL), self.poisoned()
        caches, options = (*self.stored, out_TND, self.block_tables_SB), options | {"scales": self.scales}
        prefill(self.q_TND, *caches, plan=plan, scale=0.3, window=window, **options)
        return out_TND


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("dim", "group", "window"), [(128, 4, None), (80, 7, 33)])
def test_decoding(kind: torch.dtype, dim: int, group: int, window: int | None, dtype: torch.dtype) -> None:
    """A context in parts, one in a single part, and a short one."""
    pages = RoundedPages([(1, 150), (1, 60), (1, 3)], kind, dtype=dtype, dim=dim, group=group)
    assert_near(pages.decoded(window=window), pages.exact(scale=0.3, window=window))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_prefill(kind: torch.dtype, window: int | None, dtype: torch.dtype) -> None:
    """Tiles at a window's edge, in the middle and up to the diagonal."""
    pages = RoundedPages([(11, 30), (3, 60), (2, 2)], kind, dtype=dtype, dim=32, group=2)
    assert_near(pages.prefilled(window=window), pages.exact(scale=0.3, window=window))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scores_are_capped_behind_their_scales(kind: torch.dtype) -> None:
    options: Any = {"softcap": 2.0, "sinks_N": torch.tensor([3.0, -1.0, 0.0, 1.0], device=DEVICE)}
    decoding = RoundedPages([(1, 100), (1, 20)], kind, dtype=torch.float32, group=2, dim=32)
    assert_near(decoding.decoded(**options), decoding.exact(scale=0.3, window=None, **options))
    prompts = RoundedPages([(4, 30)], kind, dtype=torch.float32, group=2, dim=32)
    assert_near(prompts.prefilled(**options), prompts.exact(scale=0.3, window=None, **options))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_byte_has_its_fp8_value(kind: torch.dtype, dtype: torch.dtype) -> None:
    pages = RoundedPages([(1, 1)] * 2, kind, dtype=dtype, dim=128, group=1, num_kv_heads=1)
    bytes_BD = torch.arange(256).view(2, 128).to(torch.uint8)
    wanted_BD = bytes_BD.view(kind).float()
    for row in range(2):
        block = int(pages.block_tables_SB[row, 0])
        pages.stored[1].view(torch.uint8)[block, 0, 0] = bytes_BD[row].to(DEVICE)
        if kind == torch.int8:
            pages.scales[1][block, 0, 0] = 0.25
    scale = 0.25 if kind == torch.int8 else float(pages.scales[1][0])
    found_BD, broken_BD = pages.decoded()[:, 0].cpu(), wanted_BD.isnan()
    assert torch.equal(found_BD.isfinite(), ~broken_BD)
    wanted_BD = (wanted_BD * scale).to(dtype)
    torch.testing.assert_close(found_BD[~broken_BD], wanted_BD[~broken_BD], rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "dim", "block_size"), [(2, 128, 16), (3, 80, 7)])
def test_tokens_are_written_with_the_bits_of_the_twin(
    kind: torch.dtype, num_kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Heads of zeros, tiny, huge and infinite numbers and NaN, and a slot that is padding."""
    num_tokens, num_blocks = 9, 4
    q_TND = normal(num_tokens, 2 * num_kv_heads, dim, dtype=dtype)
    k_TKD, v_TKD = (normal(num_tokens, num_kv_heads, dim, dtype=dtype, seed=seed) * 30 for seed in (1, 2))
    for x_TKD in (k_TKD, v_TKD):
        x_TKD[0, 0] = 0.0
        x_TKD[1] *= 1e-3
        x_TKD[2, 0, 1], x_TKD[3, 0, 2], x_TKD[4, 0, -1] = 3e4, float("inf"), float("nan")
        x_TKD[5, 0, :8] = torch.tensor([1.0, -1.0, 0.5, 1.5, 2.5, -0.5, 127.0, -127.0])
    angles_TP = torch.zeros(num_tokens, dim // 2, device=DEVICE)  # turned, two ways of rounding could be a step apart
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    slots[7] = -1
    made = []
    for write in (rope_kv_write, twins.rope_kv_write):
        there = slice(None) if write is rope_kv_write else slots >= 0
        caches = torch.full((2, num_blocks, num_kv_heads, block_size, dim), 7, dtype=torch.uint8, device=DEVICE)
        scales = torch.full((2, num_blocks, num_kv_heads, block_size), 7.0, device=DEVICE)
        if kind != torch.int8:
            scales = torch.tensor([[0.5, 0.037, 2.0], [0.25, 0.011, 1.0]], device=DEVICE)[:, :num_kv_heads]
        q_THD, k_THD, v_THD = (x_THD[there] for x_THD in (q_TND, k_TKD, v_TKD))
        cos_TP, sin_TP, (keys, values) = angles_TP[there].cos(), angles_TP[there].sin(), caches.view(kind)
        here_T = slots[there].to(DEVICE)
        write(q_THD, k_THD, v_THD, cos_TP, sin_TP, keys, values, here_T, (scales[0], scales[1]))
        made.append((caches, scales))
    assert torch.equal(made[0][0], made[1][0])
    torch.testing.assert_close(made[0][1], made[1][1], rtol=0, atol=0, equal_nan=True)


def test_missing_scales_are_not_read() -> None:
    pages = RoundedPages([(1, 5)], torch.int8, dtype=torch.float32, dim=32)
    pages.scales = pages.scales[0][:, :1], pages.scales[1]
    with pytest.raises(AssertionError, match="scales of keys are"):
        pages.decoded()
    pages.scales = None  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"keys and values of type torch\.int8 without scales"):
        pages.decoded()
