"""Prefix blocks that a request computes or loads. Other requests that begin with them wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from protos.values import BlockHash
from workers.scheduling.request import Request, State


class PendingBlocks:
    def __init__(self) -> None:
        self._owners: dict[BlockHash, Request] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, block_hash: BlockHash | None) -> bool:
        return block_hash in self._owners

    def add(self, request: Request, hashes: Iterable[BlockHash]) -> None:
        """Registers a request's blocks. The first request that computes a block owns it."""
        for block_hash in hashes:
            self._owners.setdefault(block_hash, request)

    def discard(self, request: Request, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            if self._owners.get(block_hash) is request:
                del self._owners[block_hash]

    def num_leading(self, hashes: Iterable[BlockHash]) -> int:
        return len(list(takewhile(self._owners.__contains__, hashes)))

    def check_integrity(self) -> None:
        for block_hash, request in self._owners.items():
            assert request.state is State.RUNNING or request.onload, "a pending block's owner does not compute"
            assert block_hash in request.hashes[request.num_sealed :]
