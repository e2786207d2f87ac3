"""What happened, in order, as lines of text whose hash is the run's fingerprint: same seed, same lines, same hash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import Any


class Chronicle:
    """`write` gets every line, if given. Facts are numbers and words: no address of memory, no real time. Seconds are
    since `begin`, when the load and the faults' times begin; what came before waits for it, and has negative ones."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.num_events = 0
        self._write = write
        self._hash = blake2b(digest_size=16)
        self._loop = asyncio.get_running_loop()
        self._start_s: float | None = None
        self._before: list[tuple[float, str]] = []

    def begin(self) -> None:
        self._start_s = self._loop.time()
        for at_s, text in self._before:
            self._put(at_s - self._start_s, text)
        self._before.clear()

    def note(self, kind: str, subject: str, **facts: Any) -> None:
        told = "".join(f" {name}={value}" for name, value in facts.items())
        text = f"{kind} {subject}{told}\n"
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
