"""The identity of a KV block: a chained 128-bit hash over everything before it, the same for a cache and for an index.

The chain starts at a root drawn from the tenant's salt, so equal prompts of two tenants share no hash at all. The hash
is BLAKE2b: whoever chooses prompts, and knows everything but the salt, still cannot make one that has another's hash
(docs/adr/0009). Long chains are hashed by compiled code (hashing.c), short ones by hashlib: the same hashes.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

from kvtransfer.native import load
from protos.chain import Chain
from protos.values import BLOCK_HASH_BYTES, BlockHash

_TOKEN_BYTES = 4
_FEW = 4  # blocks that hashlib is done with before compiled code would have been called

Hash = Callable[[BlockHash, bytes, int], bytes]
"""(parent, tokens as little-endian words, bytes of a block) -> the packed hashes of all blocks."""


def root_hash(salt: bytes = b"") -> BlockHash:
    """What the first block of a tenant's prompts is chained to. It names no block and never crosses a boundary."""
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
    ids = array("I", token_ids[: num_full * block_size])
    assert ids.itemsize == _TOKEN_BYTES
    if sys.byteorder == "big":
        ids.byteswap()
    hashed = in_python if num_full < _FEW else fastest()
    return Chain(hashed(root_hash(salt) if parent is None else parent, ids.tobytes(), block_size * _TOKEN_BYTES))


def in_python(parent: BlockHash, data: bytes, block_bytes: int) -> bytes:
    """A `Hash` that needs no compiler."""
    view = memoryview(data)
    hashes: list[BlockHash] = []
    for start in range(0, len(data), block_bytes):
        digest = blake2b(parent, digest_size=BLOCK_HASH_BYTES)
        digest.update(view[start : start + block_bytes])
        parent = digest.digest()
        hashes.append(parent)
    return b"".join(hashes)


@cache
def fastest() -> Hash:
    """The best `Hash` of this machine. Its first call may compile for half a second: processes that serve call it
    before they do."""
    library = load(Path(__file__).with_suffix(".c")) if sys.byteorder == "little" else None
    if library is None:
        return in_python
    chain = library.chain
    chain.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
    chain.restype = None

    def compiled(parent: BlockHash, data: bytes, block_bytes: int) -> bytes:
        num_blocks = len(data) // block_bytes
        out = ctypes.create_string_buffer(num_blocks * BLOCK_HASH_BYTES)
        chain(parent, data, num_blocks, block_bytes, out)
        return out.raw

    return compiled
