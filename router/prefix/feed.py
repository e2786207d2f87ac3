"""Keeps a prefix index equal to its workers' events, which are numbered within each life of a worker. None may be
missing.

worker ── its own stream ──────────▶ receive ─┐
                                              ├─▶ one cursor a worker ─▶ index      the first copy is applied
other gateways ── Redis, if any ───▶ receive_shared ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.events import EventCursor, Gap
from protos.values import BlockHash, Hello, KVEvent, KVEvents
from router.prefix.index import PrefixIndex

Routed = Callable[[str, int, int], None]
"""Called with a worker, and the blocks and cached blocks of a prompt that another gateway has just routed to it."""
Observe = Callable[[str, Sequence[KVEvent]], None]
"""Called with a worker's events after they have been applied."""


class Feed:
    """Applies every worker's events to `index`, and requests those that are missing.

    `num_gaps` counts the times events of a worker were missing. `trouble` says why sharing with other gateways has
    stopped, `warning` what an operator should know although it works; "" for nothing. `start` returns when the others'
    knowledge has been loaded, or after a few seconds without them.
    """

    trouble = ""

    def __init__(self, index: PrefixIndex, *, gateway_id: str) -> None:
        self.index = index
        self.gateway_id = gateway_id
        self.num_gaps = 0
        self.routed: Routed = lambda worker_id, num_blocks, num_cached: None
        self.observe: Observe | None = None
        self._cursors: dict[str, EventCursor] = {}
        self._asking: set[str] = set()

    @property
    def warning(self) -> str:
        return ""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def expect(self, worker_id: str, hashes: Sequence[BlockHash], *, until: float) -> None:
        self.index.expect(worker_id, hashes, until=until)

    def hello(self, worker_id: str, incarnation: int) -> Hello:
        """The greeting for a new connection to a worker. Blocks of the worker's former life are dropped."""
        cursor = self._cursors.get(worker_id)
        if cursor is None or cursor.incarnation != incarnation:
            self.drop(worker_id)
            cursor = self._cursors[worker_id] = EventCursor()
        self._asking.discard(worker_id)
        return Hello(gateway_id=self.gateway_id, incarnation=cursor.incarnation, next_seq=cursor.next_seq)

    def receive(self, worker_id: str, message: KVEvents) -> Hello | None:
        """Applies a worker's message. If events are missing, nothing changes, and the result is a Hello that requests
        them, once per gap. The worker then replays them or sends a snapshot."""
        news = self._cursors[worker_id].accept(message)
        if not isinstance(news, Gap):
            self._asking.discard(worker_id)
            self._apply(worker_id, news)
            self._received(worker_id, message)
            return None
        if worker_id in self._asking:
            return None
        self._asking.add(worker_id)
        self.num_gaps += 1
        return Hello(gateway_id=self.gateway_id, incarnation=news.incarnation, next_seq=news.next_seq)

    def receive_shared(self, worker_id: str, message: KVEvents) -> bool:
        """Applies a message that a worker sent to another gateway. False, without any change, if events are missing."""
        cursor = self._cursors.get(worker_id) or EventCursor()
        news = cursor.accept(message)
        if isinstance(news, Gap):
            return False
        self._cursors[worker_id] = cursor
        self._apply(worker_id, news)
        return True

    def position(self, worker_id: str) -> tuple[int, int]:
        cursor = self._cursors.get(worker_id)
        return (cursor.incarnation, cursor.next_seq) if cursor is not None else (0, 0)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(self._cursors)

    def lost(self, worker_id: str) -> None:
        """Records the end of a connection. The worker's cached blocks are kept: it may reconnect in the same life."""

    def drop(self, worker_id: str) -> None:
        self._cursors.pop(worker_id, None)
        self._asking.discard(worker_id)
        self.index.drop(worker_id)

    def _apply(self, worker_id: str, events: Sequence[KVEvent]) -> None:
        self.index.apply(worker_id, events)
        if self.observe is not None:
            self.observe(worker_id, events)

    def _received(self, worker_id: str, message: KVEvents) -> None:
        """Called after a worker's own message was applied."""
