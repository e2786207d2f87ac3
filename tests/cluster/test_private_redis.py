"""A redis-server for the gateway processes of one machine: reached by its socket, with any password, and ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.discovery.redis_members import connect
from cluster.gateway.private_redis import PrivateRedis

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("password", ["", 'a "quoted" \\ word é'])
async def test_it_takes_the_password_of_all_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], password: str
) -> None:
    monkeypatch.setenv("BATON_REDIS_PASSWORD", password)
    server = PrivateRedis(tmp_path)
    await server.start()
    async with await connect(server.url) as client:
        assert await client.set("key", "value")
    await server.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(tmp_path / "redis.sock")
    assert capfd.readouterr() == ("", "")
