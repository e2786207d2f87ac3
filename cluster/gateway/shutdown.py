"""The end of a gateway's patience: who is still being answered gets a typed error, not a broken connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from protos.errors import Unavailable
from router.jobs import Generate, Job, TokenDelta
from router.streaming.token_sink import TokenSink


class Cutoff:
    """A `Generate` that runs another one until `cut`; it costs nothing per token."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._running: set[asyncio.Task[Any]] = set()
        self._is_cut = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    def cut(self) -> None:
        """Every job that runs, and every later one, fails with Unavailable."""
        self._is_cut = True
        for task in self._running:
            task.cancel()

    async def __call__(self, job: Job, sink: TokenSink | None = None) -> AsyncGenerator[TokenDelta, None]:
        if self._is_cut:
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with aclosing(self._generate(job, sink)) as deltas:
                async for delta in deltas:
                    yield delta
        except asyncio.CancelledError:
            # Ours, if we cut it: then whoever waits for the job learns why, and goes on. Everybody else's passes.
            if not self._is_cut or task.uncancel() > 0:
                raise
            raise _stopping() from None
        finally:
            self._running.discard(task)


def _stopping() -> Unavailable:
    return Unavailable("this server is stopping: send the request again", retry_after_s=1.0)
