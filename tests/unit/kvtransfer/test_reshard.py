"""Every head of every position gets to every rank that needs it, exactly once, whatever the two shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.reshard import (
    Cut,
    covering,
    cut_in,
    cut_out,
    heads_of,
    incoming,
    outgoing,
    pieces,
    plan,
    require_compatible,
    why_incompatible,
)
from kvtransfer.transport import Chunk
from protos.errors import IncompatibleWorkers
from protos.values import KVLayout, LaneAddress, Ticket
from tests.layouts import changed
from workers.kv.kinds import with_kv_dtype

LAYOUT = KVLayout.dense(
    num_layers=3, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16", model="m", device="cpu"
)


def tps(num_heads: int) -> st.SearchStrategy[int]:
    return st.sampled_from([tp for tp in range(1, 25) if num_heads % tp == 0 or tp % num_heads == 0])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Two workers of one model, with any degrees of parallelism and any block sizes of which one divides the other."""
    heads = draw(st.integers(1, 12))
    small, factor = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    layout = changed(LAYOUT, num_kv_heads=heads, block_size=small)
    other = replace(layout, block_size=small * factor, tp=draw(tps(heads)))
    layout = replace(layout, tp=draw(tps(heads)))
    return (layout, other) if draw(st.booleans()) else (other, layout)


@given(pairs())
def test_every_destination_head_is_sent_once_by_a_holder(pair: tuple[KVLayout, KVLayout]) -> None:
    source, destination = pair
    assert why_incompatible(source, destination) is None
    for rank in range(destination.tp):
        got = [head for part in incoming(source, destination, rank) for head in part.heads]
        assert got == list(heads_of(destination, rank))
    for rank in range(source.tp):
        sent = outgoing(source, destination, rank)
        assert all(set(part.heads) <= set(heads_of(source, rank)) for part in sent)
        in_payload = [head for piece in pieces(sent) for head in piece]
        assert in_payload == sorted(set(in_payload)), "pieces of a payload overlap, or are out of order"


@given(pairs())
def test_copies_of_a_head_share_the_sending(pair: tuple[KVLayout, KVLayout]) -> None:
    source, destination = pair
    copies, askers = max(1, source.tp // source.num_kv_heads), max(1, destination.tp // source.num_kv_heads)
    sent = Counter((part.source, head) for part in plan(source, destination) for head in part.heads)
    assert max(sent.values()) <= -(-askers // min(copies, askers))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tp_there", [1, 2, 4])
def test_a_latent_goes_once_to_each_destination_rank(tp: int, tp_there: int) -> None:
    source, destination = (
        KVLayout.latent(num_layers=2, width=576, dtype="bfloat16", block_size=16, tp=size) for size in (tp, tp_there)
    )
    assert why_incompatible(source, destination) is None
    sent = plan(source, destination)
    assert sorted(part.destination for part in sent) == list(range(tp_there))
    assert max(Counter(part.source for part in sent).values()) == -(-tp_there // tp)


def cells(cut: Cut, layout: KVLayout) -> list[tuple[int, int, int, int]]:
    """(layer, block, head, position) of what a payload holds, in its order; padding has block -1."""
    per_block = layout.block_size // cut.unit
    return [
        (layer, block, head, unit % per_block * cut.unit + offset)
        for piece in cut.pieces
        for layer in cut.layers
        for unit in cut.units
        for block in [cut.block_ids[unit // per_block] if unit // per_block < len(cut.block_ids) else -1]
        for head in piece
        for offset in range(cut.unit)
    ]


@given(pairs(), st.integers(0, 3), st.integers(1, 40), st.data())
def test_every_cell_lands_where_its_token_belongs(
    pair: tuple[KVLayout, KVLayout], num_cached: int, num_missing: int, data: st.DataObject
) -> None:
    """A chunk is cut out of every source rank and into every destination rank: the same layer, head and token of the
    prompt at both ends of every slice, and every cell of the destination's blocks written once."""
    source, destination = pair
    size = destination.block_size
    num_tokens = num_cached * size + num_missing
    ticket = Ticket(
        ticket_id="t",
        generation=1,
        lease_s=1.0,
        block_ids=tuple(range(100, 100 + -(-num_missing // size))),
        num_cached_tokens=num_cached * size,
        layout=destination,
        destination=LaneAddress(worker_id="d", incarnation=1, host="", port=0),
    )
    first = data.draw(st.integers(0, len(ticket.block_ids) - 1))
    count = data.draw(st.integers(1, len(ticket.block_ids) - first))
    first_layer = data.draw(st.integers(0, 2))
    chunk = Chunk(
        ticket_id="t",
        generation=1,
        first_block=first,
        num_blocks=count,
        first_layer=first_layer,
        num_layers=data.draw(st.integers(1, 3 - first_layer)),
    )
    held = range(-(-num_tokens // source.block_size))
    covered = covering(ticket, chunk, source.block_size)
    ours = [index for index in covered if index in held]
    written: list[Counter[tuple[int, int, int, int]]] = [Counter() for _ in range(destination.tp)]
    for part in plan(source, destination):
        out = cut_out(source, part.source, ticket, chunk, ours)
        into = cut_in(destination, part.destination, source, chunk, ticket.block_ids[first : first + count])
        left, right = heads_of(source, part.source).start, heads_of(destination, part.destination).start
        out = replace(out, pieces=(range(part.heads.start - left, part.heads.stop - left),))
        into = replace(into, pieces=(range(part.heads.start - right, part.heads.stop - right),))
        sent, landed = cells(out, source), cells(into, destination)
        assert len(sent) == len(landed)
        for (layer, block, head, offset), cell in zip(sent, landed, strict=True):
            token = num_cached * size + (cell[1] - 100) * size + cell[3]
            assert (layer, head + left) == (cell[0], cell[2] + right)
            assert (block == -1 and token >= num_tokens) or block * source.block_size + offset == token
        written[part.destination].update(landed)
    for rank, rank_cells in enumerate(written):
        assert set(rank_cells.values()) == {1}
        cells_of_a_rank = len(chunk.layers(destination)) * count * size * len(heads_of(destination, rank))
        assert len(rank_cells) == cells_of_a_rank


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (changed(LAYOUT, num_layers=2), "num_layers is 3 there and 2 here"),
        (changed(LAYOUT, head_dim=16), "head_dim is 8 there and 16 here"),
        (changed(LAYOUT, num_kv_heads=2), "num_kv_heads is 4 there and 2 here"),
        (changed(LAYOUT, dtype="float16"), "dtype is 'bfloat16' there and 'float16' here"),
        (with_kv_dtype(LAYOUT, "int8"), "kv_dtype is 'bfloat16' there and 'int8' here: "),
        (with_kv_dtype(LAYOUT, "fp8"), "kv_dtype is 'bfloat16' there and 'float8_e4m3fn' here: "),
        (replace(LAYOUT, model="n"), "model is 'm' there and 'n' here"),
        (replace(LAYOUT, device="cuda"), "device is 'cpu' there and 'cuda' here"),
        (replace(LAYOUT, block_size=6), "block_size is 4 there and 6 here, of which neither divides"),
        (replace(LAYOUT, tp=3), "tp is 3 here, which neither divides the 4 key/value heads"),
    ],
)
def test_incompatible_layouts_are_refused_by_name(other: KVLayout, reason: str) -> None:
    with pytest.raises(IncompatibleWorkers, match=f"from worker p0 to worker d0: {reason}"):
        require_compatible("p0", LAYOUT, "d0", other)


def test_layouts_that_differ_in_their_cut_are_compatible() -> None:
    assert why_incompatible(LAYOUT, replace(LAYOUT, tp=8, block_size=32)) is None
    assert why_incompatible(LAYOUT, replace(LAYOUT, device="")) is None, (
        "one that does not say may be of an older version"
    )
