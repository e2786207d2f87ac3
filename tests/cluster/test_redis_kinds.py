"""Every kind of Redis that a URL may name, as real servers: with password and TLS, behind Sentinels, as a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvtransfer.hashing import chain_hashes
from protos.values import BlockStored, KVEvents
from router.prefix.redis_store import EventEntry, PromptEntry, Store, StreamPositions
from router.prefix.redis_url import parse
from tests.cluster.redis_server import RedisServer

pytestmark = pytest.mark.cluster

CHAIN = chain_hashes(range(64), 16)
TOLD = KVEvents(incarnation=3, first_seq=0, events=(BlockStored(hashes=CHAIN),))
PATIENCE_S = 20.0


@asynccontextmanager
async def store(url: str) -> AsyncIterator[Store]:
    connected = Store(parse(url, setting="index").client(timeout_s=5.0), model="a {model}", gateway_id="g")
    try:
        yield connected
    finally:
        await connected.close()


async def everything_works(url: str) -> None:
    async with store(url) as connected:
        assert await connected.acquire("w", 3)
        assert await connected.append("w", [TOLD])
        assert await connected.write("w", KVEvents(incarnation=3, first_seq=1, events=TOLD.events, snapshot=True))
        assert await connected.renew(["w"]) == []
        await connected.expect("w", CHAIN, for_s=2.0)
        assert await connected.worker_ids() == ["w"]
        assert await connected.holders(["w", "v"]) == {"w": "g", "v": None}
        snapshot = await connected.snapshot("w")
        assert snapshot is not None
        assert snapshot[0].events == TOLD.events
        entries = await connected.read(StreamPositions(), wait=True)
        assert [type(entry) for entry in entries] == [EventEntry, EventEntry, PromptEntry]
        assert (await connected.ends())["events"] != "0-0"
        await connected.release("w")
        await connected.tidy("w")
        assert await connected.worker_ids() == []


async def test_one_server_with_a_password_under_tls(tmp_path: Path) -> None:
    key, certificate, ca = (tmp_path / f"{name}.pem" for name in ("key", "certificate", "ca"))
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(certificate)
    authority.cert_pem.write_to_path(ca)
    server = RedisServer(tmp_path, "--requirepass", "s@crt", "--tls-auth-clients", "no", "--port", "0",
                         "--tls-cert-file", str(certificate), "--tls-key-file", str(key))  # fmt: skip
    server.add("--tls-port", str(server.port))
    server.start()
    try:
        where = f"127.0.0.1:{server.port}/1"
        await everything_works(f"rediss://:s%40crt@{where}?ssl_ca_certs={ca}")
        for refused in (f"rediss://:wrong@{where}?ssl_ca_certs={ca}", f"rediss://:s%40crt@{where}"):
            async with store(refused) as connected:
                with pytest.raises(RedisError):
                    await connected.worker_ids()
    finally:
        server.stop()


async def test_a_cluster(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--cluster-enabled", "yes")
    server.start()
    try:
        client: Any = Redis.from_url(server.url)  # redis-py says no types of commands it has no method for
        async with client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            async with asyncio.timeout(PATIENCE_S):
                while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        await everything_works(f"redis+cluster://127.0.0.1:{server.port}")
    finally:
        server.stop()


async def test_servers_behind_a_sentinel(tmp_path: Path, redis: RedisServer) -> None:
    (tmp_path / "sentinel.conf").write_text(f"sentinel monitor main 127.0.0.1 {redis.port} 1\n")
    sentinel = RedisServer(tmp_path, config=tmp_path / "sentinel.conf")
    sentinel.start()
    try:
        await everything_works(f"redis+sentinel://127.0.0.1:{sentinel.port}/main")
    finally:
        sentinel.stop()
