"""The cache's tensors: what is taken out of some blocks can be put into others, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from protos.values import KVLayout
from workers.kv.storage import KVStorage

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, block_size=2, dtype="bfloat16", tp=2)


def filled(num_blocks: int) -> KVStorage:
    storage = KVStorage(LAYOUT, num_blocks=num_blocks)
    storage.data.copy_(torch.arange(storage.data.numel()).view(storage.data.shape) % 251)
    return storage


def test_blocks_move_to_other_places_of_another_cache() -> None:
    source, destination = filled(6), KVStorage(LAYOUT, num_blocks=9)
    payload = source.gather([4, 0, 5])
    assert payload.shape == (3, 2, 3, 2, 2, 8)
    assert payload.is_contiguous()
    source.data.zero_()  # the source's blocks may be reused at once
    destination.scatter([8, 2, 7], payload)
    before = filled(6)
    for layer in range(3):
        assert torch.equal(destination.keys(layer)[[8, 2, 7]], before.keys(layer)[[4, 0, 5]])
        assert torch.equal(destination.values(layer)[[8, 2, 7]], before.values(layer)[[4, 0, 5]])
    untouched = [0, 1, 3, 4, 5, 6]
    assert not destination.data[:, :, untouched].any()


def test_a_range_of_a_blocks_heads_is_contiguous() -> None:
    payload = filled(6).gather([1, 3])
    assert payload[0, 1, 1, 0:1].is_contiguous()
    assert payload[0, 1, 1].stride() == (2 * 8, 8, 1)


def test_the_ranks_blocks_add_up_to_the_layouts() -> None:
    assert filled(5).block_bytes * LAYOUT.tp == LAYOUT.block_bytes
    assert filled(5).num_bytes == 5 * filled(5).block_bytes


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (4, 1), (8, 1)])
def test_more_ranks_than_heads_keep_a_copy_each(tp: int, heads: int) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=4, head_dim=8, block_size=2, dtype="float32", tp=tp)
    assert KVStorage(layout, num_blocks=1).num_heads == heads


def test_a_payload_of_another_layout_is_not_written() -> None:
    storage = filled(4)
    with pytest.raises(AssertionError, match="does not fit"):
        storage.scatter([1], filled(4).gather([1, 2]))
    with pytest.raises(AssertionError, match=r"payload is torch\.float32"):
        storage.scatter([1], filled(4).gather([1]).float())
