"""The batches of a gateway process, wired.

line ─▶ route, as a client's request ─▶ below (`behind_people`) ─▶ workers
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.batches.batch_runner import BatchMetrics, BatchRoom, BatchRunner
from router.dispatch.chooser import Routing
from router.files.batch_storage import BatchStorage, open_storage
from router.gateway import Gateway
from router.http.pace import Pace
from router.jobs import Generate
from router.request_metrics import RequestMetrics
from router.router_config import BatchConfig, RouterConfig
from router.traces.request_trace import RequestTraces


def open_runner(
    config: BatchConfig,
    gateway: Gateway,
    storage: BatchStorage,
    *,
    generate: Generate,
    records: RequestTraces,
    registry: CollectorRegistry,
) -> BatchRunner:
    """Opens the runner. `gateway` serves clients; a batch does not use its limits, traces and metrics. `records`: those
    of `generate`."""
    own = replace(
        gateway,
        generate=generate,
        metrics=RequestMetrics(model=gateway.card.name),
        routing=Routing(records=records),
        observers=(gateway.access.metrics,),
        pace=Pace(),
        models=(),
    )
    room = BatchRoom(gateway.fleet, config.max_running)
    return BatchRunner(own, storage, room, BatchMetrics(registry), lease_s=config.lease_s)


def storage_for(config: RouterConfig) -> BatchStorage | None:
    """None without a folder or a database. Raises Misconfigured."""
    batch = config.batch
    if not (batch.folder or config.database):
        return None
    return open_storage(
        batch.folder if batch.is_in_bucket else Path(batch.folder) if batch.folder else None,
        max_file_bytes=batch.max_file_bytes,
        max_lines=batch.max_lines,
        max_tenant_bytes=batch.max_tenant_bytes,
        database_url=config.database,
    )


class BatchService:
    """A process's part in the batches of a model. Nothing runs without a `storage`."""

    def __init__(self, config: BatchConfig, storage: BatchStorage | None) -> None:
        self._config = config
        self._running: asyncio.Task[None] | None = None
        self.storage = storage

    def start(
        self, gateway: Gateway, *, generate: Generate, records: RequestTraces, registry: CollectorRegistry
    ) -> None:
        if self.storage is not None:
            runner = open_runner(
                self._config, gateway, self.storage, generate=generate, records=records, registry=registry
            )
            self._running = asyncio.create_task(runner.run(), name="batches")

    async def stop(self) -> None:
        """Gives the batches back for another process."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
