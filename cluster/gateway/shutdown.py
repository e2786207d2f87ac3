"""The end of the grace period: clients still being answered get a typed error, not a broken connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from protos.errors import Unavailable
from router.jobs import Generate, Job, TokenDelta


class Cutoff:
    """A `Generate` that runs another one until `cut`; adds no cost per token."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._running: set[asyncio.Task[Any]] = set()
        self._is_cut = False

    def cut(self) -> None:
        """Fails every running job, and every later one, with Unavailable."""
        self._is_cut = True
        for task in self._running:
            task.cancel()

    async def __call__(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        if self._is_cut:
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with aclosing(self._generate(job)) as deltas:
                async for delta in deltas:
                    yield delta
        except asyncio.CancelledError:
            # Cancelled by `cut`: the job's consumer gets the error and continues. Any other cancellation passes.
            if not self._is_cut or task.uncancel() > 0:
                raise
            raise _stopping() from None
        finally:
            self._running.discard(task)


def _stopping() -> Unavailable:
    return Unavailable("this server is stopping: send the request again", retry_after_s=1.0)
