"""The cache's tensors: what is taken out of some blocks can be put into others, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.reshard import Cut
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


@given(st.data())
def test_a_cut_is_what_indexing_gives_and_lands_in_any_other(data: st.DataObject) -> None:
    """Some layers, some heads, parts of blocks: out of one cache into another with blocks of another size."""
    source, destination = filled(6), KVStorage(replace(LAYOUT, block_size=1), num_blocks=20)
    blocks = data.draw(st.permutations(range(6)).map(lambda ids: ids[:3]))
    first = data.draw(st.integers(0, 5))
    layer = data.draw(st.integers(0, 2))
    pieces = data.draw(st.sampled_from([(range(2),), (range(1), range(1, 2)), (range(1, 2),)]))
    out = Cut(block_ids=tuple(blocks), unit=1, units=range(first, 6), layers=range(layer, 3), pieces=pieces)
    payload = source.read(out, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    places = tuple(range(9, 9 + 6 - first))
    destination.write(replace(out, block_ids=places, units=range(6 - first)), payload)
    tokens = source.data[:, :, blocks].transpose(2, 3).flatten(3, 4)[:, :, :, first:]  # [L, 2, K, tokens, D]
    expected = torch.zeros_like(destination.data)
    for heads in pieces:
        part = tokens[layer:, :, heads.start : heads.stop].transpose(2, 3).unsqueeze(4)
        expected[layer:, :, places[0] : places[-1] + 1, heads.start : heads.stop] = part
    assert torch.equal(destination.data, expected)


def test_beyond_the_last_block_its_last_unit_is_repeated() -> None:
    """For a destination whose larger last block the prompt does not fill."""
    source = filled(6)
    cut = Cut(block_ids=(4, 1), unit=2, units=range(4), layers=range(3), pieces=(range(2),))
    payload = source.read(cut, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    assert torch.equal(payload.view(3, 2, 4, 2, 2, 8), source.data[:, :, [4, 1, 1, 1]])


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
