"""The identity of a KV block: a chained 128-bit hash over everything before it, the same for a cache and for an index.

The chain starts at a root drawn from the tenant's salt, so equal prompts of two tenants share no hash at all. The hash
is BLAKE2b: a user who chooses prompts, and knows everything but the salt, cannot make one with another prompt's hash
(docs/adr/0009). Long chains are hashed by compiled code (hashing.c), short ones by hashlib: the same hashes.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

from kvtransfer.native import Functions, load
from protos.chain import Chain
from protos.values import BLOCK_HASH_BYTES, BlockHash

_TOKEN_BYTES = 4
_FEW = 4  # blocks that hashlib hashes faster than a call of compiled code


class Remembering(tuple[int, ...]):
    """Token ids that remember their hashes and checked bound. This helps where gateway and workers are one process, as
    in a simulation. A slice or sum is a plain tuple."""

    hashed: dict[tuple[BlockHash, int, int], bytes]
    are_below: dict[int, bool]

    def __new__(cls, token_ids: Iterable[int]) -> Remembering:
        self = super().__new__(cls, token_ids)
        self.hashed = {}
        self.are_below = {}
        return self


def root_hash(salt: bytes = b"") -> BlockHash:
    """The parent of the first block of a tenant's prompts. It names no block and never leaves the process."""
    return blake2b(salt, digest_size=BLOCK_HASH_BYTES, person=b"baton-kv-root").digest()


def salted(salt: bytes, key: bytes) -> bytes:
    """The salt of prompts whose KV depends on `key` too, not only on tenant and tokens; `salt` for an empty key."""
    return root_hash(salt) + key if key else salt


def chain_hashes(
    token_ids: Sequence[int], block_size: int, *, salt: bytes = b"", parent: BlockHash | None = None
) -> Chain:
    """Hashes of the full blocks of `token_ids`, in order; a rest shorter than `block_size` has none.

    With `parent`, the hash of the block before the first token, a chain is extended (`salt` is in it already):
    ``chain_hashes(a + b) == first + chain_hashes(b, parent=first[-1])`` when `a` is whole blocks hashing to `first`.
    Token ids are unsigned 32-bit numbers; others raise OverflowError.
    """
    num_full = len(token_ids) // block_size
    root = root_hash(salt) if parent is None else parent
    library = compiled() if num_full >= _FEW else None
    if library is None:
        ids = array("I", token_ids[: num_full * block_size])
        assert ids.itemsize == _TOKEN_BYTES
        if sys.byteorder == "big":
            ids.byteswap()
        return Chain(_in_python(root, ids.tobytes(), block_size * _TOKEN_BYTES))
    if not isinstance(token_ids, Remembering):
        whole = token_ids if isinstance(token_ids, tuple | list) else list(token_ids)
        return Chain(_of_ids(library, root, whole, num_full, block_size))
    key = root, num_full, block_size
    if key not in token_ids.hashed:
        token_ids.hashed[key] = _of_ids(library, root, token_ids, num_full, block_size)
    return Chain(token_ids.hashed[key])


def _of_ids(
    library: ctypes.PyDLL, root: BlockHash, token_ids: Sequence[int], num_blocks: int, block_size: int
) -> bytes:
    out = ctypes.create_string_buffer(num_blocks * BLOCK_HASH_BYTES)
    block = ctypes.create_string_buffer(block_size * _TOKEN_BYTES)
    wrong = library.chain_ids(root, token_ids, isinstance(token_ids, list), num_blocks, block_size, block, out)
    if wrong >= 0:
        raise OverflowError(f"token id {token_ids[wrong]} is not a number from 0 to 2**32 - 1")
    return out.raw


def _in_python(parent: BlockHash, data: bytes, block_bytes: int) -> bytes:
    view = memoryview(data)
    hashes: list[BlockHash] = []
    for start in range(0, len(data), block_bytes):
        digest = blake2b(parent, digest_size=BLOCK_HASH_BYTES)
        digest.update(view[start : start + block_bytes])
        parent = digest.digest()
        hashes.append(parent)
    return b"".join(hashes)


@cache
def compiled() -> ctypes.PyDLL | None:
    """None without a compiler. The first call may compile for half a second, so serving processes call it early."""
    text, number = ctypes.c_char_p, ctypes.c_int64
    functions: Functions = {"chain_ids": ((text, ctypes.py_object, ctypes.c_int, number, number, text, text), number)}
    return load(Path(__file__).with_suffix(".c"), functions) if sys.byteorder == "little" else None
