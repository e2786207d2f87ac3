"""Keeps a prefix index true to its workers' events: numbered, of one life of the worker, none missing."""

from __future__ import annotations

from kvtransfer.events import EventCursor, Gap
from protos.values import Hello, KVEvents
from router.prefix.index import PrefixIndex


class Feed:
    """Applies every worker's events to `index`, and says what to ask a worker for when some are missing.

    `num_gaps` counts the times events were missing.
    """

    def __init__(self, index: PrefixIndex, *, gateway_id: str) -> None:
        self.index = index
        self.num_gaps = 0
        self._gateway_id = gateway_id
        self._cursors: dict[str, EventCursor] = {}
        self._asking: set[str] = set()

    def hello(self, worker_id: str, incarnation: int) -> Hello:
        """How to greet a worker that has just been met. What a former life of it had cached is forgotten."""
        cursor = self._cursors.get(worker_id)
        if cursor is None or cursor.incarnation != incarnation:
            self.drop(worker_id)
            cursor = self._cursors[worker_id] = EventCursor()
        self._asking.discard(worker_id)
        return Hello(gateway_id=self._gateway_id, incarnation=cursor.incarnation, next_seq=cursor.next_seq)

    def receive(self, worker_id: str, message: KVEvents) -> Hello | None:
        """Applies a message. Where events are missing, nothing changes and the Hello to close the gap with comes
        back, once per gap: the worker replays them or sends a snapshot, and what follows fits again."""
        news = self._cursors[worker_id].accept(message)
        if not isinstance(news, Gap):
            self._asking.discard(worker_id)
            self.index.apply(worker_id, news)
            return None
        if worker_id in self._asking:
            return None
        self._asking.add(worker_id)
        self.num_gaps += 1
        return Hello(gateway_id=self._gateway_id, incarnation=news.incarnation, next_seq=news.next_seq)

    def drop(self, worker_id: str) -> None:
        """Forgets a worker that has left."""
        self._cursors.pop(worker_id, None)
        self._asking.discard(worker_id)
        self.index.drop(worker_id)
