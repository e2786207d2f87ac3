"""The seam between routing and whatever remembers which worker caches which block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from protos.values import BlockHash, BlockStored, KVEvent


class PrefixIndex(Protocol):
    """Called on the router's event loop only, and never blocks it. Times are seconds of that loop's clock."""

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> Mapping[str, int]:
        """How many leading blocks of the chain each worker holds, or is expected to; workers with none are absent."""
        ...

    def apply(self, worker_id: str, events: Sequence[KVEvent]) -> None:
        """Takes events in their order; the caller has seen to it that none is missing."""
        ...

    def drop(self, worker_id: str) -> None:
        """Forgets a worker, what it holds and what was expected of it. An unknown one is no error."""
        ...

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        """Counts a whole chain as held until then: the worker was just given this prompt and will say so itself soon.

        A `BlockRemoved` or `Cleared` of the worker ends the expectation as well.
        """
        ...

    def num_blocks(self, worker_id: str) -> int:
        """Blocks the worker has said it holds."""
        ...

    def blocks(self, worker_id: str) -> tuple[BlockStored, ...]:
        """What the worker has said it holds, as chains, every parent before its children: applied to an empty index,
        they say the same."""
        ...
