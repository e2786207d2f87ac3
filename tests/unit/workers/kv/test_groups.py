"""How layers are divided into groups that free what lies behind their windows, and what shares memory then."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.reshard import rank_block_bytes
from protos.values import KVLayout
from workers.kv.groups import MAX_GROUPS, with_windows
from workers.kv.kv_storage import KVStorage


def layout_for(windows: list[int | None]) -> KVLayout:
    dense = KVLayout.dense(num_layers=len(windows), num_kv_heads=2, head_dim=4, dtype="float32", block_size=2, tp=2)
    return with_windows(dense, windows)


def every(interval: int, num_layers: int, window: int = 8) -> list[int | None]:
    """Each `interval`-th layer reads everything."""
    return [window if (layer + 1) % interval else None for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (every(6, 48), [8, 8, 8, 8, 8, 8]),  # Gemma 3 12B: as it comes out
        (every(6, 34), [5, 4, 5, 5, 5, 5, 5]),  # 4B: the full layers fill their group, one windowed group has a gap
        (every(2, 24), [12, 12]),  # gpt-oss
        (every(4, 32), [8, 8, 8, 8]),  # Command R7B
        ([8] * 32, [32]),
        ([None] * 20 + [8] * 8, [10, 10, 8]),
        ([None] * 4, [4]),
    ],
)
def test_groups_have_as_many_layers_where_that_can_be(windows: list[int | None], sizes: list[int]) -> None:
    layout = layout_for(windows)
    assert sorted(len(group.layers) for group in layout.groups) == sorted(sizes)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(windows)))
    for group in layout.groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
    assert (layout.groups[0].window is None) == (None in windows), "events name the blocks of the first group"


def test_too_many_groups_are_one_with_masks() -> None:
    layout = layout_for([None] + [8] * 60)
    assert len(layout.groups) == 1
    assert not layout.frees_blocks
    assert len(layout_for(every(6, 62)).groups) <= MAX_GROUPS


def test_groups_share_memory_page_by_page() -> None:
    layout = layout_for(every(2, 4))  # layers 1 and 3 read everything
    storage = KVStorage(layout, num_blocks=6)
    assert storage.num_bytes == 3 * rank_block_bytes(layout) == 3 * layout.block_bytes // 2
    storage.keys(1)[3] = 7.0
    assert torch.equal(storage.keys(0)[3], storage.keys(1)[3]), "both are the first of their group"
    assert not storage.keys(2)[3].any()
    assert not storage.keys(3)[3].any()
