"""The supervisor's calls to a worker: its health, a drain, its retirement, and another role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from protos.errors import BatonError, WorkerLost
from protos.event_loop import loop_time
from protos.values import WorkerRole
from router.fleet.channels import OpenChannel
from router.fleet.worker_client import WorkerClient

log = logging.getLogger("baton.cluster")

DRAIN_PERIOD_S = 0.1
IDLE_S = 1.0  # a request that waits in line at a gateway comes sooner, once there is room
HEALTH_TIMEOUT_S = 5.0
CONTROL_S = 2.0


class WorkerCalls:
    """A `WorkerControl` over gRPC."""

    def __init__(self, open_channel: OpenChannel) -> None:
        self._open_channel = open_channel

    async def check_health(self, address: str) -> None:
        async with self._client(address, HEALTH_TIMEOUT_S) as client:
            health = await client.health(from_supervisor=True)
        if not health.healthy:
            raise WorkerLost(health.reason)

    async def drain(self, address: str) -> None:
        with _warned(f"worker at {address} could not be drained"):
            async with self._client(address) as client:
                while await client.drain():  # noqa: ASYNC110 - the worker is asked again
                    await asyncio.sleep(DRAIN_PERIOD_S)

    async def retire(self, address: str) -> None:
        """Returns when nothing has run on the worker for a moment."""
        idle_since_s: float | None = None
        with _warned(f"worker at {address} could not be retired"):
            async with self._client(address) as client:
                while True:
                    now = loop_time()
                    idle_since_s = None if await client.retire() else idle_since_s or now
                    if idle_since_s is not None and now - idle_since_s >= IDLE_S:
                        return
                    await asyncio.sleep(DRAIN_PERIOD_S)

    async def change_role(self, address: str, role: WorkerRole) -> None:
        async with self._client(address) as client:
            while await client.change_role(role) is not role:  # noqa: ASYNC110 - the worker is asked again
                await asyncio.sleep(DRAIN_PERIOD_S)

    @asynccontextmanager
    async def _client(self, address: str, timeout_s: float = CONTROL_S) -> AsyncIterator[WorkerClient]:
        client = WorkerClient(
            address, connect_timeout_s=timeout_s, control_timeout_s=timeout_s, open_channel=self._open_channel
        )
        try:
            yield client
        finally:
            await client.close()


@contextmanager
def _warned(what: str) -> Iterator[None]:
    try:
        yield
    except BatonError as error:
        log.warning("%s: %s", what, error.message)
