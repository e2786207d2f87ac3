"""The prefix index in compiled tables (table_index.c): microseconds a match, and a few dozen bytes a block.

    a block      hash, parent, and which workers hold it: one of few distinct sets, stored once
    a match      bisects the chain, for a worker that holds a block holds those before it ...
    an orphan    ... unless it has removed one of them: that worker's chains are walked, block by block
    two tiers    a second set of workers beside the first, and a second match, for workers that use both

So a match is exact for any order of evictions. It takes logarithmic time in the prompt's blocks when workers evict
tails first, as Baton's do. Events must have the right parents: a block stored under a wrong parent may be found where a
walk would not find it.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from kvtransfer.native import Functions, load
from protos.chain import Chain
from protos.errors import Internal
from protos.values import BLOCK_HASH_BYTES, BlockHash, BlockRemoved, BlockStored, Cleared, KVEvent, Tier
from router.prefix.index import Match

MAX_WORKERS = 4096
_FAILED = 2**32 - 1
_APART = 2**31
_NO_PARENT = bytes(BLOCK_HASH_BYTES)

_P, _S, _N, _F = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_double
_FUNCTIONS: Functions = {
    "table_new": ((ctypes.c_uint64, ctypes.c_uint64), _P),
    "table_free": ((_P,), None),
    "table_store": ((_P, _N, _N, _S, _N, _S), ctypes.c_int),
    "table_remove": ((_P, _N, _N, _S, _N), None),
    "table_clear": ((_P, _N), None),
    "table_expect": ((_P, _N, _S, _N, _F), ctypes.c_int),
    "table_expire": ((_P, _F), None),
    "table_match": ((_P, _S, _N, _P), _N),
    "table_held": ((_P, _N), _N),
    "table_hosted": ((_P, _N), _N),
    "table_entries": ((_P,), _N),
    "table_export": ((_P, _N, _N, _P, _P, _P), _N),
    "table_check": ((_P,), _N),
}


class TablePrefixIndex:
    """`PrefixIndex` for up to 4,096 workers. Raises Internal where there is no compiler: check `compiled` before."""

    def __init__(self) -> None:
        library = compiled()
        if library is None:
            raise Internal("the prefix index's tables are not compiled: use MemoryPrefixIndex")
        self._library = library
        self._table = library.table_new(secrets.randbits(64), secrets.randbits(64))
        if not self._table:
            raise MemoryError("no memory for a prefix index")
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []
        self._found = (ctypes.c_uint32 * (4 * MAX_WORKERS + 1))()  # slots, depths, and those of workers with two tiers

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            self._library.table_free(self._table)

    def match(self, hashes: Sequence[BlockHash], *, now: float) -> Match:
        self._library.table_expire(self._table, now)
        packed = Chain.of(hashes).packed
        numbers, names = self._found, self._names
        num = self._library.table_match(self._table, packed, len(packed) // BLOCK_HASH_BYTES, numbers)
        stop = num & ~_APART
        slots, depths = numbers[:stop], numbers[MAX_WORKERS : MAX_WORKERS + stop]
        blocks = {names[slot]: depth for slot, depth in zip(slots, depths, strict=True)}
        if stop == num:
            return Match(blocks)  # type: ignore[arg-type]
        start = 2 * MAX_WORKERS + 1
        apart = numbers[start : start + 2 * numbers[start - 1]]
        on_device = {names[slot]: depth for slot, depth in zip(apart[::2], apart[1::2], strict=True)}
        return Match(blocks, on_device)  # type: ignore[arg-type]

    def apply(self, worker_id: str, events: Sequence[KVEvent]) -> None:
        table, library, slot = self._table, self._library, self._slot(worker_id)
        for event in events:
            if isinstance(event, Cleared):
                library.table_clear(table, slot)
                continue
            packed = Chain.of(event.hashes).packed
            num = len(packed) // BLOCK_HASH_BYTES
            if isinstance(event, BlockRemoved):
                library.table_remove(table, slot, event.tier, packed, num)
            else:
                _check(library.table_store(table, slot, event.tier, packed, num, event.parent or None))

    def drop(self, worker_id: str) -> None:
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            self._library.table_clear(self._table, slot)
            self._names[slot] = None

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        packed = Chain.of(hashes).packed
        num = len(packed) // BLOCK_HASH_BYTES
        _check(self._library.table_expect(self._table, self._slot(worker_id), packed, num, until))

    def num_blocks(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        return 0 if slot is None else int(self._library.table_held(self._table, slot))

    def num_on_host(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        return 0 if slot is None else int(self._library.table_hosted(self._table, slot))

    def blocks(self, worker_id: str) -> tuple[BlockStored, ...]:
        tiers = Tier if self.num_on_host(worker_id) else (Tier.DEVICE,)
        return tuple(chain for tier in tiers for chain in self._chains(worker_id, tier))

    def _chains(self, worker_id: str, tier: Tier) -> Iterator[BlockStored]:
        num = self.num_blocks(worker_id)
        if not num:
            return
        keys = ctypes.create_string_buffer(num * BLOCK_HASH_BYTES)
        parents = ctypes.create_string_buffer(num * BLOCK_HASH_BYTES)
        starts = (ctypes.c_uint32 * (num + 1))()
        chains = self._library.table_export(self._table, self._slots[worker_id], tier, keys, starts, parents)
        if chains == _FAILED:
            raise MemoryError(f"no memory to list {num} blocks")
        packed, above, width = keys.raw, parents.raw, BLOCK_HASH_BYTES
        for number, (start, end) in enumerate(pairwise(starts[: chains + 1])):
            yield BlockStored(
                hashes=Chain(packed[start * width : end * width]),
                parent=above[number * width : (number + 1) * width].replace(_NO_PARENT, b""),
                tier=tier,
            )

    @property
    def num_entries(self) -> int:
        return int(self._library.table_entries(self._table))

    def check_integrity(self) -> None:
        """Every counter agrees with what it counts. Reads everything."""
        line = self._library.table_check(self._table)
        assert not line, f"the tables contradict themselves: table_index.c, line {line}"

    def _slot(self, worker_id: str) -> int:
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = next((free for free, name in enumerate(self._names) if name is None), len(self._names))
            if slot >= MAX_WORKERS:
                raise Internal(f"the prefix index knows {MAX_WORKERS} workers, {worker_id} would be one more")
            self._names[slot : slot + 1] = [worker_id]
            self._slots[worker_id] = slot
        return slot


@cache
def compiled() -> ctypes.PyDLL | None:
    return load(Path(__file__).with_suffix(".c"), _FUNCTIONS)


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the prefix index")
