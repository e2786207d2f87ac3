"""The supervisor's calls to a worker: its health, a drain, its retirement, and another role."""

from __future__ import annotations

import asyncio
import logging

from protos.errors import BatonError, WorkerLost
from protos.event_loop import loop_time
from protos.values import WorkerRole
from router.fleet.channels import OpenChannel
from router.fleet.worker_client import WorkerClient

log = logging.getLogger("baton.cluster")

DRAIN_PERIOD_S = 0.1
IDLE_S = 1.0  # a request that waits in line at a gateway comes sooner, once there is room
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


async def retire(open_channel: OpenChannel, address: str) -> None:
    """Returns when nothing has run on the worker for a moment, while gateways begin nothing with its revision any more;
    or when it is gone."""
    client = WorkerClient(address, connect_timeout_s=2.0, control_timeout_s=2.0, open_channel=open_channel)
    idle_since_s: float | None = None
    try:
        while True:
            now = loop_time()
            idle_since_s = None if await client.retire() else idle_since_s or now
            if idle_since_s is not None and now - idle_since_s >= IDLE_S:
                return
            await asyncio.sleep(DRAIN_PERIOD_S)
    except BatonError as error:
        log.warning("worker at %s could not be retired: %s", address, error.message)
    finally:
        await client.close()


async def change_role(open_channel: OpenChannel, address: str, role: WorkerRole) -> None:
    """Returns when the worker has the role: its running requests have moved or ended before. Raises BatonError if it
    refuses or cannot be reached."""
    client = WorkerClient(address, connect_timeout_s=2.0, control_timeout_s=2.0, open_channel=open_channel)
    try:
        while True:
            if await client.change_role(role) is role:
                return
            await asyncio.sleep(DRAIN_PERIOD_S)
    finally:
        await client.close()
