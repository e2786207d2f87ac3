"""The supervisor's calls to a worker: its health, and a drain."""

from __future__ import annotations

import asyncio
import logging

from protos.errors import BatonError, WorkerLost
from router.fleet.channels import OpenChannel
from router.fleet.worker_client import WorkerClient

log = logging.getLogger("baton.cluster")

DRAIN_PERIOD_S = 0.1
HEALTH_TIMEOUT_S = 5.0


async def check_health(open_channel: OpenChannel, address: str) -> None:
    """Raises BatonError for a worker that is unhealthy, or does not answer in time."""
    client = WorkerClient(
        address,
        connect_timeout_s=HEALTH_TIMEOUT_S,
        control_timeout_s=HEALTH_TIMEOUT_S,
        open_channel=open_channel,
    )
    try:
        health = await client.health(from_supervisor=True)
    finally:
        await client.close()
    if not health.healthy:
        raise WorkerLost(health.reason)


async def drain(open_channel: OpenChannel, address: str) -> None:
    """Returns when nothing runs on the worker any more, or when it is gone."""
    client = WorkerClient(address, connect_timeout_s=2.0, control_timeout_s=2.0, open_channel=open_channel)
    try:
        while True:
            if not await client.drain():
                return
            await asyncio.sleep(DRAIN_PERIOD_S)
    except BatonError as error:
        log.warning("worker at %s could not be drained: %s", address, error.message)
    finally:
        await client.close()
