"""Prefill attention: chunks of any length over cached prefixes of any length give what float64 gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.conftest import DEVICE, assert_near
from tests.kernels.pages import Pages
from workers.kernels.prefill import PrefillPlan, plan_prefill, prefill
from workers.kernels.tile import Tile

SMALL = Tile(rows=32, positions=16, warps=2, stages=2)


def run(pages: Pages, rows: list[int], *, window: int | None = None, tile: Tile = SMALL) -> torch.Tensor:
    work_W4 = plan_prefill(rows, pages.query_starts, pages.context_lens, group=pages.group, tile=tile)
    plan = PrefillPlan(work_W4=torch.from_numpy(work_W4).to(DEVICE), tile=tile)
    out_TND = pages.poisoned()
    caches = pages.k_cache, pages.v_cache
    prefill(pages.q_TND, *caches, out_TND, pages.block_tables_SB, plan=plan, scale=0.3, window=window)
    return out_TND


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize(("dim", "block_size"), [(32, 16), (64, 32), (128, 16), (80, 16)])
def test_shapes(dtype: torch.dtype, group: int, dim: int, block_size: int) -> None:
    pages = Pages([(11, 30)], dtype=dtype, dim=dim, group=group, block_size=block_size, num_kv_heads=1)
    assert_near(run(pages, [0]), pages.exact(scale=0.3, window=None))


@pytest.mark.parametrize("window", [None, 1, 5, 24, 1000])
@pytest.mark.parametrize("tile", [SMALL, Tile(rows=16, positions=64, warps=2, stages=2)], ids=["narrow", "wide"])
def test_packed_rows_of_any_length_and_windows(dtype: torch.dtype, window: int | None, tile: Tile) -> None:
    """Chunks with and without cached prefix, ending before, on and behind the borders of tiles and pages."""
    rows = [(2, 2), (16, 16), (17, 33), (3, 64), (3, 17), (9, 50)]
    pages = Pages(rows, dtype=dtype, group=2, num_kv_heads=1, dim=32)
    assert_near(run(pages, list(range(6)), window=window, tile=tile), pages.exact(scale=0.3, window=window))


def test_only_the_named_rows_are_written(dtype: torch.dtype) -> None:
    pages = Pages([(1, 20), (4, 9), (0, 0), (5, 5)], dtype=dtype, dim=32)
    ours = run(pages, [1, 3])
    assert ours[0].isnan().all()
    assert_near(ours[1:], pages.exact(scale=0.3, window=None)[1:])


rows_of_chunks = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=6)


@given(rows_of_chunks, st.sampled_from([1, 4, 7]))
def test_the_tiles_cover_each_token_once(chunks: list[tuple[int, int]], group: int) -> None:
    starts = [0]
    for count, _ in chunks:
        starts.append(starts[-1] + count)
    lens = [count + cached for count, cached in chunks]
    work_W4 = plan_prefill(range(len(chunks)), starts, lens, group=group, tile=SMALL)
    positions = sorted(
        (row, token + index, position + index)
        for row, token, count, position in work_W4.tolist()
        for index in range(count)
    )
    expected = [
        (row, starts[row] + index, cached + index)
        for row, (count, cached) in enumerate(chunks)
        for index in range(count)
    ]
    assert positions == expected
    assert all(0 < count * group <= SMALL.rows for count in work_W4[:, 2].tolist())
    assert work_W4[:, 3].tolist() == sorted(work_W4[:, 3].tolist(), reverse=True)
