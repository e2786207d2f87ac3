"""Opens the prefix index, in this process or shared through Redis, as one setting decides."""

from __future__ import annotations

import logging

from kvtransfer import hashing
from router.prefix.feed import Feed
from router.prefix.index import PrefixIndex
from router.prefix.memory_index import MemoryPrefixIndex
from router.prefix.table_index import TablePrefixIndex, compiled

log = logging.getLogger("baton.router")

MEMORY = "memory"
TIMEOUT_S = 2.0  # of a command to Redis


def local_index() -> PrefixIndex:
    """The best index of this machine. The first call may compile for a second."""
    hashing.compiled()
    return TablePrefixIndex() if compiled() is not None else MemoryPrefixIndex()


def open_feed(where: str, *, model: str, gateway_id: str) -> Feed:
    if where == MEMORY:
        return Feed(local_index(), gateway_id=gateway_id)
    from router.prefix.redis_index import RedisFeed
    from router.prefix.redis_store import Store
    from router.prefix.redis_url import parse

    url = parse(where, setting="index")
    log.info("the prefix index is shared at %s", url.shown)
    return RedisFeed(local_index(), Store(url.client(timeout_s=TIMEOUT_S), model=model, gateway_id=gateway_id))
