"""The identity of a KV block: a chained 128-bit hash over everything before it, the same for a cache and for an index.

The chain starts at a root drawn from the tenant's salt, so equal prompts of two tenants share no hash at all.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from protos.values import BLOCK_HASH_BYTES, BlockHash

_TOKEN_BYTES = 4


def root_hash(salt: bytes = b"") -> BlockHash:
    """What the first block of a tenant's prompts is chained to. It names no block and never crosses a boundary."""
    return blake2b(salt, digest_size=BLOCK_HASH_BYTES, person=b"baton-kv-root").digest()


def salted(salt: bytes, key: bytes) -> bytes:
    """The salt of prompts whose KV depends on `key` too, not only on tenant and tokens; `salt` for an empty key."""
    return root_hash(salt) + key if key else salt


def chain_hashes(
    token_ids: Sequence[int], block_size: int, *, salt: bytes = b"", parent: BlockHash | None = None
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; a rest shorter than `block_size` has none.

    With `parent`, the hash of the block before the first token, a chain is extended (`salt` is in it already):
    ``chain_hashes(a + b) == first + chain_hashes(b, parent=first[-1])`` when `a` is whole blocks hashing to `first`.
    Token ids are unsigned 32-bit numbers; others raise OverflowError.
    """
    chained = root_hash(salt) if parent is None else parent
    num_full = len(token_ids) // block_size * block_size
    ids = array("I", token_ids[:num_full])
    assert ids.itemsize == _TOKEN_BYTES
    if sys.byteorder == "big":
        ids.byteswap()
    data = memoryview(ids).cast("B")
    stride = block_size * _TOKEN_BYTES
    hashes: list[BlockHash] = []
    for start in range(0, num_full * _TOKEN_BYTES, stride):
        digest = blake2b(chained, digest_size=BLOCK_HASH_BYTES)
        digest.update(data[start : start + stride])
        chained = digest.digest()
        hashes.append(chained)
    return hashes
