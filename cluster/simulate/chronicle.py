"""What happened, in order, as lines of text whose hash is the run's fingerprint: same seed, same lines, same hash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import Any


class Chronicle:
    """`write` gets every line, if given. Facts are numbers and words: no address of memory, no real time."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.num_events = 0
        self._write = write
        self._hash = blake2b(digest_size=16)
        self._loop = asyncio.get_running_loop()

    def note(self, kind: str, subject: str, **facts: Any) -> None:
        told = "".join(f" {name}={value}" for name, value in facts.items())
        line = f"{self._loop.time():.9f} {kind} {subject}{told}\n"
        self.num_events += 1
        self._hash.update(line.encode())
        if self._write is not None:
            self._write(line)

    @property
    def fingerprint(self) -> str:
        return self._hash.hexdigest()
