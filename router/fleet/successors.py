"""Workers that their supervisor has announced and that are about to serve. Running answers may wait for them.

starting ─▶ joined: announced, not connected yet ─▶ ready: no longer a successor
    └─▶ withdrawn, or its supervisor is silent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.values import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A worker's process that is starting. `loaded`: the loaded share of its weights, 0 to 1."""

    role: WorkerRole
    loaded: float = 0.0


class Successors:
    """The successors by worker id. The fleet updates them."""

    def __init__(self) -> None:
        self._starting: dict[str, Successor] = {}
        self._joined: set[str] = set()

    def __len__(self) -> int:
        return len(self._starting.keys() | self._joined)

    def starting(self, worker_id: str, successor: Successor | None) -> bool:
        before = self._starting.get(worker_id)
        if successor is None:
            self._starting.pop(worker_id, None)
        else:
            self._starting[worker_id] = successor
        return before != successor

    def joined(self, worker_id: str) -> None:
        self._starting.pop(worker_id, None)
        self._joined.add(worker_id)

    def arrived(self, worker_id: str) -> None:
        self._starting.pop(worker_id, None)
        self._joined.discard(worker_id)

    def of(self, role: WorkerRole | None) -> Sequence[str]:
        return [
            f"{worker_id} is starting" + (f" ({_progress(successor)})" if successor.loaded else "")
            for worker_id, successor in self._starting.items()
            if role is None or successor.role is role
        ]

    def reason(self, worker_id: str) -> str:
        successor = self._starting.get(worker_id)
        if successor is None:
            return ""
        return "its successor is starting" + (f", {_progress(successor)}" if successor.loaded else "")


def _progress(successor: Successor) -> str:
    return f"{successor.loaded:.0%} of its weights read"
