"""Opens the prefix index, in this process or shared through Redis, as one setting decides."""

from __future__ import annotations

import logging

from kvtransfer import hashing
from router.prefix.feed import Peers
from router.prefix.index import PrefixIndex
from router.prefix.memory_index import MemoryPrefixIndex
from router.prefix.table_index import TablePrefixIndex, compiled

log = logging.getLogger("baton.router")

MEMORY = "memory"
TIMEOUT_S = 2.0  # of a command to Redis


def local_index() -> PrefixIndex:
    """The best index of this machine. The first call may compile for a second."""
    hashing.fastest()
    return TablePrefixIndex() if compiled() is not None else MemoryPrefixIndex()


def open_index(where: str, *, model: str, gateway_id: str) -> tuple[PrefixIndex, Peers | None]:
    """Opens the index, and the connection to the gateways that share it, if `where` is the URL of a Redis. Raises
    Misconfigured."""
    if where == MEMORY:
        return local_index(), None
    from router.prefix.redis_index import RedisPrefixIndex
    from router.prefix.redis_store import Store
    from router.prefix.redis_url import parse

    url = parse(where, setting="index")
    log.info("the prefix index is shared at %s", url.shown)
    store = Store(url.client(timeout_s=TIMEOUT_S), model=model, gateway_id=gateway_id)
    index = RedisPrefixIndex(local_index(), store)
    return index, index
