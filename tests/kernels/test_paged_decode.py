"""Decode attention: every split, window and shape gives what float64 gives; the work list covers each context once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.conftest import DEVICE, assert_near
from tests.kernels.pages import Pages
from workers.kernels.paged_decode import DecodePlan, paged_decode, plan_decode
from workers.kernels.tile import Tile


def decode(
    pages: Pages,
    rows: list[int],
    *,
    window: int | None = None,
    min_item: int = 256,
    num_multiprocessors: int = 4,
    tile: Tile | None = None,
    softcap: float = 0.0,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    arrays = plan_decode(
        rows,
        pages.query_starts,
        pages.context_lens,
        window=window,
        num_kv_heads=pages.num_kv_heads,
        num_multiprocessors=num_multiprocessors,
        min_item=min_item,
    )
    items_W6, parts_R3 = (torch.from_numpy(array).to(DEVICE) for array in arrays)
    out_TND = pages.poisoned()
    plan = DecodePlan(items_W6=items_W6, parts_R3=parts_R3)
    caches = pages.k_cache, pages.v_cache
    paged_decode(
        pages.q_TND, *caches, out_TND, pages.block_tables_SB,
        plan=plan, scale=0.3, window=window, tile=tile, softcap=softcap, sinks_N=sinks_N,
    )  # fmt: skip
    return out_TND


@pytest.mark.parametrize("group", [1, 4, 7, 8, 20])
@pytest.mark.parametrize(("dim", "block_size"), [(32, 16), (64, 32), (128, 16), (80, 16)])
def test_shapes(dtype: torch.dtype, group: int, dim: int, block_size: int) -> None:
    pages = Pages([(1, 37)], dtype=dtype, dim=dim, group=group, block_size=block_size, num_kv_heads=2)
    assert_near(decode(pages, [0]), pages.exact(scale=0.3, window=None))


def test_more_parts_than_are_reduced_at_once(dtype: torch.dtype) -> None:
    """The weightiest key is in the last part, so earlier sums are scaled down."""
    pages = Pages([(1, 1170)], dtype=dtype, group=2, num_kv_heads=1, dim=32)
    last_block = int(pages.block_tables_SB[0, 1169 // 16])
    pages.k_cache[last_block, 0, 1169 % 16] = pages.q_TND[0, 0] * 3
    ours = decode(pages, [0], min_item=64, num_multiprocessors=16)
    assert_near(ours, pages.exact(scale=0.3, window=None))


@pytest.mark.parametrize("window", [None, 1, 33, 100, 1000])
def test_contexts_of_any_length_and_windows(dtype: torch.dtype, window: int | None) -> None:
    """Tiles and items of 64 positions: ends before, on and after their borders."""
    pages = Pages([(1, context) for context in (1, 63, 64, 65, 128, 193)], dtype=dtype)
    ours = decode(
        pages, list(range(6)), window=window, min_item=64, tile=Tile(rows=16, positions=64, warps=4, stages=3)
    )
    assert_near(ours, pages.exact(scale=0.3, window=window))


def test_a_sink_is_counted_once_for_a_context_in_parts() -> None:
    pages = Pages([(1, 300), (1, 40)], dtype=torch.float32, group=2, num_kv_heads=1, dim=32)
    options: Any = {"softcap": 2.0, "sinks_N": torch.tensor([3.0, -1.0], device=DEVICE)}
    ours = decode(pages, [0, 1], min_item=64, num_multiprocessors=16, **options)
    assert_near(ours, pages.exact(scale=0.3, window=None, **options))


def test_only_the_named_rows_are_written(dtype: torch.dtype) -> None:
    """Among chunks of a prefill, rows without tokens and padding without context, which gives zeros."""
    pages = Pages([(3, 20), (1, 40), (0, 0), (1, 5), (1, 0)], dtype=dtype)
    ours = decode(pages, [1, 3, 4], min_item=64)
    assert ours[:3].isnan().all()
    assert_near(ours[3:5], pages.exact(scale=0.3, window=None)[3:5])
    assert not ours[5].any()


def test_unlikely_scores_do_not_overflow(dtype: torch.dtype) -> None:
    """One key dominates by e**100: all splits but one weigh nothing."""
    pages = Pages([(1, 200)], dtype=dtype, group=1, num_kv_heads=1)
    pages.q_TND[:] = 1.0
    first_block = int(pages.block_tables_SB[0, 0])
    pages.k_cache[first_block, :, 3] = 6.0
    assert_near(decode(pages, [0], min_item=64), pages.exact(scale=0.3, window=None))


contexts = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(contexts, st.sampled_from([None, 1, 100, 4096]), st.integers(1, 132), st.sampled_from([1, 8]))
def test_the_work_list_covers_each_context_once(lens: list[int], window: int | None, sms: int, kv_heads: int) -> None:
    starts = list(range(len(lens) + 1))
    items_W6, parts_R3 = plan_decode(
        range(len(lens)), starts, lens, window=window, num_kv_heads=kv_heads, num_multiprocessors=sms
    )
    assert items_W6.shape == (len(lens) + max(1, 4 * sms // kv_heads), 6)
    used = items_W6[items_W6[:, 0] >= 0]
    assert (np.diff(used[:, 4] - used[:, 3]) <= 0).all()
    for row, length in enumerate(lens):
        mine = used[used[:, 0] == row]
        mine = mine[np.argsort(mine[:, 3])]
        first = 0 if window is None else max(0, length - window)
        assert first - 16 < mine[0, 3] <= first
        assert mine[-1, 4] == length
        assert (mine[1:, 3] == mine[:-1, 4]).all()
        token, slot, count = parts_R3[row].tolist()
        assert token == row
        if len(mine) == 1:
            assert (count, mine[0, 5]) == (0, -1)
        else:
            assert (mine[:, 4] > mine[:, 3]).all()
            assert mine[:, 5].tolist() == list(range(slot, slot + count))
    slots = used[used[:, 5] >= 0][:, 5]
    assert len(set(slots.tolist())) == len(slots)
    assert (slots < len(items_W6)).all()


def test_a_long_context_among_short_ones_is_shared_out() -> None:
    """No item is longer than twice the even share of the device, so nobody waits for the long row."""
    lens = [100] * 63 + [32_000]
    items_W6, _ = plan_decode(range(64), range(65), lens, window=None, num_kv_heads=8, num_multiprocessors=132)
    assert (items_W6[:, 4] - items_W6[:, 3]).max() <= 2 * sum(lens) / (4 * 132 / 8)
