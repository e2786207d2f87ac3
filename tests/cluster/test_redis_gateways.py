"""Whole gateways with one index in Redis, in front of one worker: what one reads the other knows, and Redis may go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.cli.serve import DEMO
from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.model_backend import ModelSettings
from protos.tls import FaceTls, PeerTls
from router.router_config import RouterConfig
from tests.cluster.redis_server import RedisServer
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

pytestmark = pytest.mark.cluster

PATIENCE_S = 30.0


@asynccontextmanager
async def gateway(index: str, address: str = "") -> AsyncIterator[GatewayServer]:
    config = RouterConfig(model_path=Path(DEMO["model"]), model_name="demo", grpc_port=0)
    listening = socket.create_server(("127.0.0.1", 0))
    front = GatewayServer([ModelSettings(config=config)], listening, tls=FaceTls(), peers=PeerTls(), index=index)
    await front.start()
    try:
        if address:
            front.fleet.add_worker(address, worker_id="w")
            await front.ready()
        yield front
    finally:
        await front.stop(0.0)


async def complete(front: GatewayServer) -> int:
    """How many tokens of the prompt were cached."""
    asked = {"model": "demo", "prompt": list(range(8 * BLOCK)), "max_tokens": 2, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=front.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def degraded(front: GatewayServer) -> str:
    async with httpx.AsyncClient(base_url=front.url, timeout=PATIENCE_S) as client:
        return str((await client.get("/ready")).json()["degraded"])


async def until(holds: Callable[[str], bool], front: GatewayServer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds(await degraded(front)):  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.05)


def cached_blocks(front: GatewayServer) -> int:
    return front.fleet.feed.index.num_blocks("w")


async def test_gateways_share_an_index_and_outlive_its_redis(redis: RedisServer) -> None:
    worker = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    address = (await worker.start("127.0.0.1")).address
    try:
        async with gateway(redis.url, address) as near, gateway(redis.url) as far:
            await complete(near)
            async with asyncio.timeout(PATIENCE_S):
                while not cached_blocks(far):  # noqa: ASYNC110 - told by nothing but Redis
                    await asyncio.sleep(0.05)
            assert cached_blocks(far) == cached_blocks(near)
            assert await degraded(near) == ""
            redis.stop()
            await until(lambda reason: "cannot be reached" in reason, near)
            assert await complete(near) > 0, "routing goes on"
            redis.start()
            await until(lambda reason: not reason, near)
            await until(lambda reason: not reason, far)
    finally:
        await worker.stop()
