"""Sends each request at its due time (open loop) or when another one has ended (closed loop)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.bench.bench_load import WorkloadItem
from cluster.bench.bench_report import RequestRecord


class LoadClient(Protocol):
    """`prepare` is called ahead of the due time; `ask` raises only when cancelled."""

    def prepare(self, item: WorkloadItem) -> bytes: ...

    async def ask(self, item: WorkloadItem, request: bytes, *, start_s: float) -> RequestRecord: ...


Tell = Callable[[int, RequestRecord | None], object]
"""Called with the number of running requests when one is sent (None) and when one has ended."""


async def run_load(
    items: Sequence[WorkloadItem],
    client: LoadClient,
    *,
    concurrency: int | None = None,
    tell: Tell = lambda num_running, record: None,
) -> list[RequestRecord]:
    """Returns records in the order of items. `concurrency`: None: only due times matter. A cancelled run returns the
    records so far."""
    return await _Run(client, concurrency, tell).through(items)


class _Run:
    def __init__(self, client: LoadClient, concurrency: int | None, tell: Tell) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._room = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._tell = tell
        self._records: list[RequestRecord] = []
        self._num_running = 0
        self._start_s = self._loop.time()

    async def through(self, items: Sequence[WorkloadItem]) -> list[RequestRecord]:
        this = asyncio.current_task()
        assert this is not None
        try:
            async with asyncio.TaskGroup() as group:
                self._start_s = self._loop.time()
                for item in items:
                    await self._launch(item, group)
        except asyncio.CancelledError:
            this.uncancel()
        return sorted(self._records, key=lambda record: record.index)

    async def _launch(self, item: WorkloadItem, group: asyncio.TaskGroup) -> None:
        request = self._client.prepare(item)
        if self._room is not None:
            await self._room.acquire()
        # Yields even when late: answers that have arrived are processed before the next request is sent.
        await asyncio.sleep(0 if item.due_s is None else max(0.0, self._start_s + item.due_s - self._loop.time()))
        group.create_task(self._one(item, request))
        self._num_running += 1
        self._tell(self._num_running, None)

    async def _one(self, item: WorkloadItem, request: bytes) -> None:
        try:
            record = await self._client.ask(item, request, start_s=self._start_s)
        finally:
            if self._room is not None:
                self._room.release()
        self._records.append(record)
        self._num_running -= 1
        self._tell(self._num_running, record)
