"""Which workers can exchange KV, and which part of it then goes from which rank to which. Pure integers.

    heads         0   1   2   3   4   5   6   7
    source      |──── rank 0 ───|──── rank 1 ───|    tp 2        0 ▶ 0: heads 0-1    1 ▶ 2: heads 4-5
    destination |─ 0 ──|─ 1 ────|─ 2 ──|─ 3 ────|    tp 4        0 ▶ 1: heads 2-3    1 ▶ 3: heads 6-7

A rank holds its share of the heads or, where there are more ranks than heads, a copy of one. What one rank sends or
receives of a chunk is its payload: one piece for each range of heads, ascending, one piece after the other, each

    [layers, parts, units, heads, positions of a unit, width]      for each shape of parts that the layout has

Keys and values have one shape: they are two parts of one such tensor. A part that is not cut by heads counts as one.
Behind them in each piece stands the KV of a head that drafts, if both workers have the same one.

A unit is as many positions as the smaller of the two block sizes, so both sides find it in one piece in a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from kvtransfer.transport import Chunk
from protos.codec import Value
from protos.errors import IncompatibleWorkers
from protos.values import ITEM_BYTES, KVLayout, KVPart, Ticket

EIGHT_BITS = frozenset(dtype for dtype, num_bytes in ITEM_BYTES.items() if num_bytes == 1)
"""Types that `worker.kv_dtype` gives to keys and values, and not `worker.dtype`."""


def why_incompatible(source: KVLayout, destination: KVLayout) -> str | None:
    """Why no KV can move between these layouts; None when it can. Either all ranks of a lane are on GPUs or none is."""
    theirs, ours = _facts(source), _facts(destination)
    eight_bits = any(part.dtype in EIGHT_BITS for layout in (source, destination) for part in layout.parts)
    settings = {"dtype": "kv_dtype"} if eight_bits else {}
    reasons = [
        f"{settings.get(name, name)} is {theirs[name]!r} there and {ours[name]!r} here"
        for name in ours
        if theirs[name] != ours[name]
    ]
    if source.groups != destination.groups and not reasons:
        freeing = f"free_windows is {source.frees_blocks} there and {destination.frees_blocks} here"
        unequal = source.frees_blocks != destination.frees_blocks
        reasons.append(freeing if unequal else "layers are grouped otherwise there than here")
    if source.device and destination.device and source.device != destination.device:
        reasons.append(f"device is {source.device!r} there and {destination.device!r} here")
    sizes = sorted((source.block_size, destination.block_size))
    if sizes[0] < 1 or sizes[1] % sizes[0]:
        reasons.append(
            f"block_size is {source.block_size} there and {destination.block_size} here, of which neither divides "
            f"the other"
        )
    for layout, where in ((source, "there"), (destination, "here")):
        if not shares_heads(layout):
            reasons.append(
                f"tp is {layout.tp} {where}, which neither divides the {layout.num_kv_heads} key/value heads nor is a "
                f"multiple of them"
            )
        if len({part.heads for part in layout.parts if part.cut_by_heads}) > 1:
            reasons.append(f"parts of the cache {where} are cut into different numbers of heads")
    return "; ".join(reasons) or None


def _facts(layout: KVLayout) -> dict[str, object]:
    """The settings that both sides must agree on, by users' names; each name once for several parts."""

    def distinct(values: Iterable[object]) -> object:
        names = tuple(dict.fromkeys(values))
        return names[0] if len(names) == 1 else names

    parts = [part for part in layout.parts if not part.is_scale]
    return {
        "model": layout.model,
        "num_layers": layout.num_layers,
        "parts": tuple([part.name for part in parts]),
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": distinct(part.width for part in parts),
        "dtype": layout.kv_dtype,
    }


def require_compatible(source: str, source_layout: KVLayout, destination: str, layout: KVLayout) -> None:
    """Raises IncompatibleWorkers, naming both workers and all that keeps them apart."""
    reason = why_incompatible(source_layout, layout)
    if reason is not None:
        raise IncompatibleWorkers(
            f"KV cannot go from worker {source} to worker {destination}: {reason}: make them agree",
            param="source_layout",
        )


def common_layout(layout: KVLayout, other: KVLayout) -> KVLayout:
    """`layout` without its head, unless both workers have the same head."""
    return layout if layout.head == other.head else replace(layout, head=None)


def can_move_head(layout: KVLayout, parts: Sequence[KVPart]) -> bool:
    """Whether a head with these parts is divided over the ranks of `layout` as the model's own KV, so that one plan
    serves both. `layout` is of one group."""
    shares = layout.num_kv_heads
    cut = {part.cut_by_heads for part in layout.parts} == {part.cut_by_heads for part in parts}
    return cut and all(
        not part.cut_by_heads or part.heads == shares or (part.heads % shares == 0 and layout.tp <= shares)
        for part in parts
    )


def shares_heads(layout: KVLayout) -> bool:
    """Whether the ranks can divide the heads evenly, or share each of them."""
    tp, heads = layout.tp, layout.num_kv_heads
    return tp > 0 and heads > 0 and (heads % tp == 0 or tp % heads == 0)


def heads_of(layout: KVLayout, rank: int) -> range:
    """The key/value heads of a rank."""
    assert 0 <= rank < layout.tp, f"rank {rank} of {layout.tp}"
    first = rank * layout.num_kv_heads // layout.tp
    return range(first, first + max(1, layout.num_kv_heads // layout.tp))


def rank_block_bytes(layout: KVLayout) -> int:
    """Bytes of a block in the memory of each rank: its share of the heads, and all undivided parts."""
    return layout.stored_bytes * len(heads_of(layout, 0)) // layout.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The range of heads that one source rank sends to one destination rank in every chunk."""

    source: int
    destination: int
    first_head: int
    num_heads: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


def plan(source: KVLayout, destination: KVLayout) -> tuple[Slice, ...]:
    """All slices between two compatible workers, by destination rank and then by head: each destination rank gets each
    of its heads once. Destination ranks take turns at the source ranks that hold copies of a head."""
    copies = max(1, source.tp // source.num_kv_heads)
    slices = []
    for rank in range(destination.tp):
        wanted = heads_of(destination, rank)
        for owner in range(rank % copies, source.tp, copies):
            held = heads_of(source, owner)
            first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
            if first < stop:
                slices.append(Slice(source=owner, destination=rank, first_head=first, num_heads=stop - first))
    return tuple(slices)


def outgoing(source: KVLayout, destination: KVLayout, rank: int) -> tuple[Slice, ...]:
    """The slices that a source rank sends, by destination rank. Slices of the same heads share a piece of its
    payload."""
    return tuple(part for part in plan(source, destination) if part.source == rank)


def incoming(source: KVLayout, destination: KVLayout, rank: int) -> tuple[Slice, ...]:
    return tuple(part for part in plan(source, destination) if part.destination == rank)


def pieces(slices: Sequence[Slice]) -> tuple[range, ...]:
    """The ranges of heads in a rank's payload, in order."""
    return tuple(sorted({part.heads for part in slices}, key=lambda heads: heads.start))


class Cut(Value, frozen=True, kw_only=True):
    """Where a payload lies in one rank's cache. `layers` count within the group whose pages `block_ids` are.

    `pieces` count heads from the rank's first. Unit i is the `i % k`-th of the k = block size / `unit` units in block
    `block_ids[i // k]`; `units` may run past the last block: what is there is padding, and the last unit stands for it.
    """

    block_ids: tuple[int, ...]
    unit: int
    units: range
    layers: range
    pieces: tuple[range, ...]
    with_head: bool = False  # the KV of a head follows these layers

    @property
    def num_heads(self) -> int:
        return sum(map(len, self.pieces))


def cut_out(layout: KVLayout, rank: int, ticket: Ticket, chunk: Chunk, block_ids: Sequence[int]) -> Cut:
    """A chunk in the cache of a source rank. `block_ids` are those of `covering`, without blocks after the prompt's
    end."""
    unit, per_block = _unit(layout, ticket.layout)
    first_token = (ticket.starts[chunk.group] + chunk.first_block) * ticket.layout.block_size
    first = first_token % layout.block_size // unit
    count = chunk.num_blocks * (ticket.layout.block_size // unit)
    assert 0 < len(block_ids) <= -(-(first + count) // per_block), f"{len(block_ids)} blocks for {count} units"
    return Cut(
        block_ids=tuple(block_ids),
        unit=unit,
        units=range(first, first + count),
        layers=chunk.layers(layout),
        pieces=_pieces_out(layout, ticket.layout, rank),
        with_head=chunk.carries_head(common_layout(layout, ticket.layout)),
    )


def cut_in(layout: KVLayout, rank: int, source: KVLayout, chunk: Chunk, block_ids: Sequence[int]) -> Cut:
    """A chunk in the cache of a destination rank, for whose blocks it was cut."""
    assert len(block_ids) == chunk.num_blocks
    unit, per_block = _unit(layout, source)
    return Cut(
        block_ids=tuple(block_ids),
        unit=unit,
        units=range(chunk.num_blocks * per_block),
        layers=chunk.layers(layout),
        pieces=_pieces_in(source, layout, rank),
        with_head=chunk.carries_head(common_layout(layout, source)),
    )


def covering(ticket: Ticket, chunk: Chunk, block_size: int) -> range:
    """Indices of the blocks, of a source with this block size, that hold the chunk's tokens."""
    size = ticket.layout.block_size
    first_token = (ticket.starts[chunk.group] + chunk.first_block) * size
    return range(first_token // block_size, -(-(first_token + chunk.num_blocks * size) // block_size))


def _unit(layout: KVLayout, other: KVLayout) -> tuple[int, int]:
    unit = min(layout.block_size, other.block_size)
    return unit, layout.block_size // unit


@lru_cache(maxsize=1024)
def _pieces_out(source: KVLayout, destination: KVLayout, rank: int) -> tuple[range, ...]:
    return _local(source, rank, outgoing(source, destination, rank))


@lru_cache(maxsize=1024)
def _pieces_in(source: KVLayout, destination: KVLayout, rank: int) -> tuple[range, ...]:
    return _local(destination, rank, incoming(source, destination, rank))


def _local(layout: KVLayout, rank: int, slices: Sequence[Slice]) -> tuple[range, ...]:
    first = heads_of(layout, rank).start
    return tuple(range(heads.start - first, heads.stop - first) for heads in pieces(slices))
