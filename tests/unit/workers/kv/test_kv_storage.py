"""The cache's tensors: what is taken out of some blocks can be put into others, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.reshard import (
    Cut,
    can_move_head,
    common_layout,
    cut_in,
    cut_out,
    heads_of,
    incoming,
    outgoing,
    pieces,
    rank_block_bytes,
    why_incompatible,
)
from kvtransfer.transport import Chunk
from protos.values import KVGroup, KVHead, KVLayout, KVPart, LaneAddress, Ticket
from workers.kv.host_copies import host_copies
from workers.kv.kv_storage import DTYPES, KVStorage

LAYOUT = KVLayout.dense(num_layers=3, num_kv_heads=4, head_dim=8, block_size=2, dtype="bfloat16", tp=2)


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
def test_a_cut_equals_indexing_and_fits_any_other(data: st.DataObject) -> None:
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
    layout = KVLayout.dense(num_layers=1, num_kv_heads=4, head_dim=8, block_size=2, dtype="float32", tp=tp)
    assert KVStorage(layout, num_blocks=1).num_heads == heads


def test_a_payload_of_another_layout_is_not_written() -> None:
    storage = filled(4)
    with pytest.raises(AssertionError, match="does not fit"):
        storage.scatter([1], filled(4).gather([1, 2]))
    with pytest.raises(AssertionError, match=r"payload is torch\.float32"):
        storage.scatter([1], filled(4).gather([1]).float())


LATENT = KVPart(name="latent", heads=1, width=12, dtype="bfloat16", cut_by_heads=False)
QUANTISED = (
    *(KVPart(name=name, heads=4, width=8, dtype="int8") for name in ("key", "value")),
    *(KVPart(name=name, heads=4, width=1, dtype="float32") for name in ("key_scale", "value_scale")),
)


def grouped(parts: tuple[KVPart, ...], tp: int) -> KVLayout:
    return KVLayout(groups=(KVGroup(layers=(0, 1, 2), parts=parts),), block_size=2, tp=tp)


def bytes_of(layout: KVLayout, rank: int, *, fill: bool) -> KVStorage:
    """Every byte depends on its place among all heads; a head's storage is beside."""
    storage = KVStorage(layout, num_blocks=6)
    for part in layout.parts:
        num_layers = layout.num_layers
        whole = torch.arange(num_layers * 6 * part.heads * 2 * part.width) % 113
        heads = heads_of(layout, rank) if part.cut_by_heads else range(part.heads)
        for layer in range(num_layers):
            of_layer = whole.view(num_layers, 6, part.heads, 2, part.width)[layer]
            mine = of_layer[:, heads.start : heads.stop].to(DTYPES[part.dtype])
            storage.part(layer, part.name).copy_(mine if fill else torch.zeros_like(mine))
    if layout.head is not None:
        group = KVGroup(layers=tuple(range(layout.head.num_layers)), parts=layout.head.parts)
        storage.attach(bytes_of(replace(layout, groups=(group,), head=None), rank, fill=fill))
    return storage


LATENT_HEAD = KVHead(name="mtp", num_layers=1, parts=(LATENT,))
OWN_HEAD = KVHead(
    name="eagle:1",
    num_layers=2,
    parts=tuple(KVPart(name=name, heads=8, width=6, dtype="bfloat16") for name in ("key", "value")),
)


@pytest.mark.parametrize(
    ("parts", "head"),
    [((LATENT,), None), (QUANTISED, None), ((LATENT,), LATENT_HEAD), (QUANTISED, OWN_HEAD)],
    ids=["latent", "quantised", "latent and head", "quantised and head"],
)
@pytest.mark.parametrize(("tps"), [(1, 1), (1, 2), (2, 1), (2, 4)])
def test_parts_of_any_shape_travel_between_ranks(
    parts: tuple[KVPart, ...], head: KVHead | None, tps: tuple[int, int]
) -> None:
    source, destination = (replace(grouped(parts, tp), head=head) for tp in tps)
    assert head is None or can_move_head(source, head.parts)
    assert why_incompatible(source, destination) is None
    ticket = Ticket(
        ticket_id="t", generation=1, lease_s=1.0, block_ids=(4, 1, 3), num_cached_tokens=0, layout=destination,
        destination=LaneAddress(worker_id="d", incarnation=1, host="h", port=1),
    )  # fmt: skip
    chunk = Chunk(ticket_id="t", generation=1, first_block=0, num_blocks=3, first_layer=1)
    sent = {}
    for rank in range(source.tp):
        cut = cut_out(source, rank, ticket, chunk, (2, 0, 5))
        if cut.pieces:
            storage = bytes_of(source, rank, fill=True)
            payload = storage.read(cut, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
            ranges = pieces(outgoing(source, destination, rank))
            each = payload.numel() // sum(map(len, ranges))
            for heads, piece in zip(ranges, torch.split(payload, [each * len(heads) for heads in ranges]), strict=True):
                sent[rank, heads] = piece
    for rank in range(destination.tp):
        landed, filled_ = (bytes_of(destination, rank, fill=fill) for fill in (False, True))
        slices = incoming(source, destination, rank)
        payload = torch.cat([sent[part.source, part.heads] for part in slices])
        landed.write(cut_in(destination, rank, source, chunk, ticket.block_ids), payload)
        for part in parts:
            for layer in range(3):
                actual, expected = landed.part(layer, part.name), filled_.part(layer, part.name)
                moved = expected[[2, 0, 5]] if layer else torch.zeros_like(expected[:3])
                assert torch.equal(actual[[4, 1, 3]].float(), moved.float()), (rank, part.name, layer)
                assert not actual[[0, 2, 5]].float().any()
        if landed.beside is not None and filled_.beside is not None:
            for actual, expected in zip(landed.beside.tensors, filled_.beside.tensors, strict=True):
                assert expected.any()
                assert torch.equal(actual[:, :, [4, 1, 3]], expected[:, :, [2, 0, 5]])
                assert not actual[:, :, [0, 2, 5]].any()


def test_a_head_that_is_cut_otherwise_stays() -> None:
    fewer = tuple(replace(part, heads=2) for part in OWN_HEAD.parts)
    assert not can_move_head(grouped(QUANTISED, 1), fewer)
    assert not can_move_head(grouped(QUANTISED, 8), OWN_HEAD.parts), "ranks with copies of the model's heads"
    assert not can_move_head(grouped((LATENT,), 1), OWN_HEAD.parts)


def test_another_head_does_not_travel() -> None:
    ours, theirs = (replace(grouped(QUANTISED, 1), head=replace(OWN_HEAD, name=name)) for name in "ab")
    assert common_layout(ours, ours).head == ours.head
    assert common_layout(ours, theirs).head is None
    assert common_layout(ours, grouped(QUANTISED, 1)).head is None


@pytest.mark.parametrize("parts", [(LATENT,), QUANTISED], ids=["latent", "quantised"])
def test_the_host_keeps_parts_of_any_shape(parts: tuple[KVPart, ...]) -> None:
    storage, before = (bytes_of(grouped(parts, 2), 0, fill=True) for _ in range(2))
    storage.attach(beside := bytes_of(grouped((LATENT,), 2), 0, fill=True))
    copies = host_copies(storage, num_slots=2)
    copies.offload([1, 4], [1, 0])
    beside.data[:, :, [1, 4]] = 0
    copies.onload(1, [0, 1], [2, 3])
    assert [loaded.load_id for loaded in copies.finished()][-1] == 1
    assert torch.equal(beside.data[:, :, [2, 3]], bytes_of(grouped((LATENT,), 2), 0, fill=True).data[:, :, [4, 1]])
    for part in parts:
        for layer in range(3):
            assert torch.equal(storage.part(layer, part.name)[[2, 3]], before.part(layer, part.name)[[4, 1]])


def test_the_ranks_hold_the_layouts_shares() -> None:
    for parts, tp in (((LATENT,), 1), ((LATENT,), 4), (QUANTISED, 2), (QUANTISED, 8)):
        layout = grouped(parts, tp)
        assert KVStorage(layout, num_blocks=3).block_bytes == rank_block_bytes(layout)


def test_parts_that_are_cut_differently_are_refused() -> None:
    odd = grouped((*QUANTISED[:2], replace(QUANTISED[2], heads=2)), 1)
    assert "different numbers of heads" in str(why_incompatible(odd, odd))
