"""Block hashes in a row, packed: thousands of them are one object that compiled code and the wire take as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from protos.values import BLOCK_HASH_BYTES, BlockHash


class Chain(Sequence[BlockHash]):
    """An immutable sequence of block hashes over `packed`, their bytes without gaps. Equal to any sequence of them."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        if len(packed) % BLOCK_HASH_BYTES:
            raise ValueError(f"{len(packed)} bytes are not a whole number of block hashes of {BLOCK_HASH_BYTES} bytes")
        self.packed = packed

    @classmethod
    def of(cls, hashes: Iterable[BlockHash]) -> Chain:
        return hashes if isinstance(hashes, Chain) else cls(b"".join(hashes))

    def __len__(self) -> int:
        return len(self.packed) // BLOCK_HASH_BYTES

    @overload
    def __getitem__(self, place: int) -> BlockHash: ...
    @overload
    def __getitem__(self, place: slice) -> Chain: ...
    def __getitem__(self, place: int | slice) -> BlockHash | Chain:
        if isinstance(place, int):
            start = range(len(self))[place] * BLOCK_HASH_BYTES
            return self.packed[start : start + BLOCK_HASH_BYTES]
        start, stop, step = place.indices(len(self))
        if step != 1:
            return Chain.of(self[number] for number in range(start, stop, step))
        return Chain(self.packed[start * BLOCK_HASH_BYTES : stop * BLOCK_HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        packed, width = self.packed, BLOCK_HASH_BYTES
        return iter([packed[start : start + width] for start in range(0, len(packed), width)])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Chain):
            return self.packed == other.packed
        if isinstance(other, list | tuple):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, more: Iterable[BlockHash]) -> Chain:
        return Chain(self.packed + Chain.of(more).packed)

    def __repr__(self) -> str:
        return f"Chain of {len(self)}: {', '.join(block.hex()[:8] for block in self[:4])}{', ...' * (len(self) > 4)}"
