"""The seam between routing and the index of which worker caches which block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from protos.values import BlockHash, BlockStored, KVEvent

NONE: Mapping[str, int] = MappingProxyType({})


class Match(NamedTuple):
    """How many leading blocks of a chain each worker holds, or is expected to hold; workers with none are absent.

    `blocks` counts both tiers. `on_device` counts the leading blocks on the device, only for workers that have fewer
    there, so that it is empty without host tiers.
    """

    blocks: Mapping[str, int] = NONE
    on_device: Mapping[str, int] = NONE

    def scaled(self, size: int, into: int) -> Match:
        """The same match in blocks of `into` tokens instead of `size`; incomplete ones are left out."""
        return Match(
            {worker_id: num * size // into for worker_id, num in self.blocks.items() if num * size >= into},
            {worker_id: num * size // into for worker_id, num in self.on_device.items()},
        )

    def joined(self, other: Match) -> Match:
        return Match({**self.blocks, **other.blocks}, {**self.on_device, **other.on_device})

    def at_most(self, blocks: Mapping[str, int]) -> Match:
        if not blocks:
            return self
        fewer = {worker_id: min(num, blocks.get(worker_id, num)) for worker_id, num in self.blocks.items()}
        near = {worker_id: min(num, fewer[worker_id]) for worker_id, num in self.on_device.items()}
        return Match({worker_id: num for worker_id, num in fewer.items() if num}, near)

    def num_on_device(self, worker_id: str) -> int:
        num_blocks = self.on_device.get(worker_id)
        return self.blocks.get(worker_id, 0) if num_blocks is None else num_blocks


NO_MATCH = Match()


class PrefixIndex(Protocol):
    """The interface of prefix indexes, called on the router's event loop. No call blocks. Times are seconds of that
    loop's clock."""

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> Match: ...

    def apply(self, worker_id: str, events: Sequence[KVEvent]) -> None: ...

    def drop(self, worker_id: str) -> None: ...

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        """Counts a whole chain as on the device until then, because the worker just got this prompt and will report it.
        A `BlockRemoved` of the device or a `Cleared` ends the expectation."""
        ...

    def num_blocks(self, worker_id: str) -> int: ...

    def num_on_host(self, worker_id: str) -> int: ...

    def blocks(self, worker_id: str) -> tuple[BlockStored, ...]:
        """The worker's reported blocks as chains of one tier each, every parent before its children: applied to
        an empty index, they give the same index."""
        ...
