"""The event log: lines of text whose hash is the run's fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from cluster.simulate.world.clock import VirtualLoop


class SimulationLog:
    """Facts are numbers and words, never addresses of memory or real times. Seconds count from `begin`, when the load
    begins; earlier lines are held back and get negative times. Clean-up is not logged."""

    def __init__(self, loop: VirtualLoop, write: Callable[[str], object] | None = None) -> None:
        self.num_events = 0
        self._write = write
        self._hash = blake2b(digest_size=16)
        self._loop = loop
        self._start_s: float | None = None
        self._before: list[tuple[float, str]] = []

    def begin(self) -> None:
        """Begins the log, even of a run that ended before its load began."""
        self._start_s = self._loop.time()
        for at_s, text in self._before:
            self._put(at_s - self._start_s, text)
        self._before.clear()

    @property
    def at_s(self) -> float | None:
        """Seconds since the load began; None before it."""
        return None if self._start_s is None else self._loop.time() - self._start_s

    @property
    def over_s(self) -> float | None:
        """When the run ended; None before the load."""
        if self._start_s is None or self._loop.over_s is None or self._loop.over_s <= self._start_s:
            return None
        return self._loop.over_s - self._start_s

    def note(self, kind: str, subject: str, **facts: Any) -> None:
        if self._loop.over_s is not None:
            return
        details = "".join(f" {name}={value}" for name, value in facts.items())
        text = f"{kind} {subject}{details}\n"
        if self._start_s is None:
            self._before.append((self._loop.time(), text))
        else:
            self._put(self._loop.time() - self._start_s, text)

    def _put(self, at_s: float, text: str) -> None:
        line = f"{at_s:.9f} {text}"
        self.num_events += 1
        self._hash.update(line.encode())
        if self._write is not None:
            self._write(line)

    @property
    def fingerprint(self) -> str:
        return self._hash.hexdigest()
