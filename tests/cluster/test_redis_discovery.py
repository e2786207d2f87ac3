"""Workers announced in a real Redis: found at once, gone with their announcer, kept while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.discovery.members import Announcements
from cluster.discovery.redis_members import FleetKeys, RedisAnnouncer, RedisDiscovery, connect
from protos.errors import Misconfigured
from protos.values import WorkerRole
from router.fleet.successors import Successor
from tests.cluster.redis_server import RedisServer

pytestmark = pytest.mark.cluster

LEASE_S = 0.6
KEYS = FleetKeys()
PATIENCE_S = 20.0


class Members:
    """A gateway's view, which a test can wait for."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.left: list[str] = []
        self.successors: dict[str, Successor] = {}
        self.joins: list[str] = []
        self.degraded = ""
        self._turn = asyncio.Condition()

    def set_degraded(self, reason: str) -> None:
        self.degraded = reason
        self._notify()

    def starting(self, worker_id: str, successor: Successor | None) -> None:
        self.successors.pop(worker_id, None)
        if successor is not None:
            self.successors[worker_id] = successor
        self._notify()

    def add_worker(self, address: str, *, worker_id: str) -> None:
        self.successors.pop(worker_id, None)
        self.joins.append(f"{worker_id} {address}")
        self.addresses[worker_id] = address
        self._notify()

    async def remove_worker(self, worker_id: str) -> None:
        del self.addresses[worker_id]
        self.left.append(worker_id)
        self._notify()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._turn:
            await self._turn.wait_for(holds)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._turn:
                self._turn.notify_all()

        self._task = asyncio.ensure_future(notify())


@asynccontextmanager
async def gateway(redis: RedisServer, period_s: float = 0.1) -> AsyncIterator[tuple[Members, RedisDiscovery]]:
    members = Members()
    discovery = RedisDiscovery(await connect(redis.url), period_s=period_s, lease_s=LEASE_S)
    following = asyncio.create_task(discovery.follow(members))
    try:
        yield members, discovery
    finally:
        following.cancel()
        await asyncio.wait([following])


class Supervisor(Announcements):
    """Announces in Redis, as the owner of the fleet."""

    def __init__(self, redis_announcer: RedisAnnouncer) -> None:
        super().__init__()
        self.redis = redis_announcer

    async def die(self) -> None:
        """Without a word."""
        assert self.redis._keeper is not None
        self.redis._keeper.cancel()
        await asyncio.wait([self.redis._keeper])
        await self.redis._client.aclose()


async def supervised(redis: RedisServer, *, token: str = "", orphan_s: float = 0.0) -> Supervisor:
    made = RedisAnnouncer(await connect(redis.url), token=token, lease_s=LEASE_S, orphan_s=orphan_s)
    await made.own()
    supervisor = Supervisor(made)
    await supervisor.begin(made.publish)
    return supervisor


async def test_early_and_late_gateways_find_the_workers(redis: RedisServer) -> None:
    supervisor = await supervised(redis)
    # The period is longer than the test may take: what arrives has been published.
    async with gateway(redis, period_s=10 * PATIENCE_S) as (early, _):
        await supervisor.announce("decode-0", "h:1")
        await early.until(lambda: early.addresses == {"decode-0": "h:1"})
        await supervisor.announce("decode-0", "h:2")
        await early.until(lambda: early.addresses == {"decode-0": "h:2"})
        async with gateway(redis) as (late, _):
            await late.until(lambda: late.addresses == {"decode-0": "h:2"})
        await supervisor.withdraw("decode-0")
        await early.until(lambda: early.addresses == {})
    await supervisor.redis.close()


async def test_gateways_see_starting_workers_until_they_serve_or_fail(redis: RedisServer) -> None:
    supervisor = await supervised(redis)
    half, most = (Successor(role=WorkerRole.DECODE, loaded=loaded) for loaded in (0.5, 0.95))
    async with gateway(redis) as (members, _):
        await supervisor.announce("decode-0", "h:1")
        await members.until(lambda: members.addresses == {"decode-0": "h:1"})
        await supervisor.starting("decode-0", half)
        await supervisor.starting("prefill-0", half)
        await members.until(lambda: members.successors == {"decode-0": half, "prefill-0": half})
        await supervisor.starting("decode-0", most)
        await members.until(lambda: members.successors == {"decode-0": most, "prefill-0": half})
        await supervisor.announce("decode-0", "h:1")  # a successor at its predecessor's port
        await members.until(lambda: members.joins == ["decode-0 h:1"] * 2)
        assert members.successors == {"prefill-0": half}
        await supervisor.die()
        await members.until(lambda: members.successors == {})
        assert "prefill-0" not in members.addresses


async def test_gateways_see_a_fault_until_it_ends_or_its_supervisor_dies(
    redis: RedisServer,
) -> None:
    supervisor = await supervised(redis)
    async with gateway(redis, period_s=10 * PATIENCE_S) as (early, _):  # what arrives has been published
        await supervisor.set_degraded("Ray's raylet has ended")
        await early.until(lambda: early.degraded == "Ray's raylet has ended")
        await supervisor.set_degraded("")
        await early.until(lambda: early.degraded == "")
    async with gateway(redis) as (members, _):
        await supervisor.set_degraded("Ray's raylet has ended")
        await members.until(lambda: members.degraded == "Ray's raylet has ended")
        await supervisor.die()
        await members.until(lambda: members.degraded == "")


async def test_a_gateway_gets_a_runs_token_before_the_worker_joins(redis: RedisServer) -> None:
    """A supervisor with its token in a file announces none: its gateways have that file."""
    told: list[tuple[str, ...]] = []

    class Joins(Members):
        def add_worker(self, address: str, *, worker_id: str) -> None:
            told.append((worker_id, address))
            super().add_worker(address, worker_id=worker_id)

    members = Joins()
    ours = await supervised(redis, token="a-token-of-this-run")
    await ours.announce("decode-0", "h:1")
    discovery = RedisDiscovery(
        await connect(redis.url), learn=lambda *learned: told.append(learned), period_s=0.1, lease_s=LEASE_S
    )
    following = asyncio.create_task(discovery.follow(members))
    await members.until(lambda: members.addresses == {"decode-0": "h:1"})
    assert told.index(("h:1", "a-token-of-this-run")) < told.index(("decode-0", "h:1"))
    await ours.withdraw("decode-0")
    await members.until(lambda: members.addresses == {})
    assert members.left == ["decode-0"]
    assert ("h:1", "") in told, "a gateway keeps no token of a worker that has left"
    await ours.redis.close()
    configured = await supervised(redis)
    await configured.announce("prefill-0", "h:2")
    await members.until(lambda: members.addresses == {"prefill-0": "h:2"})
    assert told.index(("h:2", "")) < told.index(("prefill-0", "h:2"))
    following.cancel()
    await asyncio.wait([following])
    await configured.redis.close()


async def test_a_lease_is_renewed_and_ends_with_its_announcer(redis: RedisServer) -> None:
    supervisor = await supervised(redis)
    await supervisor.announce("decode-0", "h:1")
    async with gateway(redis) as (members, _):
        await members.until(lambda: len(members.addresses) == 1)
        client = await connect(redis.url)
        left_ms = await client.pttl(KEYS.announced)
        async with asyncio.timeout(PATIENCE_S):
            while (now_ms := await client.pttl(KEYS.announced)) <= left_ms:  # until it is renewed
                left_ms = now_ms
        await client.aclose()
        await supervisor.die()
        await members.until(lambda: members.addresses == {})
        following = await supervised(redis)
        await following.announce("prefill-0", "h:2")
        await members.until(lambda: members.addresses == {"prefill-0": "h:2"})
        await following.redis.close()
        await members.until(lambda: members.addresses == {})


async def test_workers_without_a_supervisor_stay_and_its_loss_is_named(redis: RedisServer) -> None:
    supervisor = await supervised(redis, orphan_s=10 * PATIENCE_S)
    await supervisor.announce("decode-0", "h:1")
    async with gateway(redis) as (members, _):
        await members.until(lambda: members.addresses == {"decode-0": "h:1"})
        assert members.degraded == ""
        await supervisor.die()
        await members.until(lambda: "baton pools" in members.degraded)
        assert members.addresses == {"decode-0": "h:1"}
        successor = RedisAnnouncer(await connect(redis.url), lease_s=LEASE_S)
        await successor.own()
        await members.until(lambda: members.degraded == "")
        assert members.addresses == {"decode-0": "h:1"}, "it has announced nothing yet"
        await successor.close()


async def test_a_fleet_has_one_owner_and_the_latest_one_keeps_it(redis: RedisServer) -> None:
    """Two supervisors would end each other's workers."""
    first, second = await supervised(redis), RedisAnnouncer(await connect(redis.url), lease_s=LEASE_S)
    await first.announce("decode-0", "h:1")
    with pytest.raises(Misconfigured) as refused:
        await second.own()
    assert refused.value.param == "fleet"
    client = await connect(redis.url)
    await client.set(KEYS.owner, "another")  # while the first stood still
    async with asyncio.timeout(PATIENCE_S):
        await first.redis.replaced.wait()
    await client.set(KEYS.announced, "{}")
    await first.redis.close(withdraw=False)
    assert (await client.get(KEYS.owner), await client.get(KEYS.announced)) == ("another", "{}")
    await client.aclose()
    await second.close()


async def test_a_successors_word_is_not_taken_back(redis: RedisServer) -> None:
    old = await supervised(redis)
    async with gateway(redis) as (members, _):
        await old.announce("decode-0", "h:1")
        await members.until(lambda: members.addresses == {"decode-0": "h:1"})
        await old.die()
        new = await supervised(redis)
        await new.announce("decode-0", "h:2")
        await members.until(lambda: members.addresses == {"decode-0": "h:2"})
        old.redis._client = await connect(redis.url)
        await old.redis.close()
        await new.announce("prefill-0", "h:3")
        await members.until(lambda: "prefill-0" in members.addresses)
        assert members.addresses["decode-0"] == "h:2"
        await new.redis.close()


async def test_workers_are_kept_while_redis_is_away_or_empty(redis: RedisServer) -> None:
    supervisor = await supervised(redis)
    async with gateway(redis) as (members, discovery):
        await supervisor.announce("decode-0", "h:1")
        await members.until(lambda: members.addresses == {"decode-0": "h:1"})
        assert discovery.trouble == ""
        redis.stop()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if discovery.trouble:
                    break
                await asyncio.sleep(0)
        assert members.addresses == {"decode-0": "h:1"}
        redis.start()
        await supervisor.announce("prefill-0", "h:2")
        await members.until(lambda: "prefill-0" in members.addresses)
        assert discovery.trouble == ""
        client = await connect(redis.url)
        await client.flushall()
        await client.publish(KEYS.changes, "")
        await client.aclose()
        await supervisor.announce("decode-1", "h:3")
        await members.until(lambda: "decode-1" in members.addresses)
        assert members.left == []
    await supervisor.redis.close()


async def test_an_unreachable_redis_is_refused_without_its_password(tmp_path: Path) -> None:
    absent = RedisServer(tmp_path)
    with pytest.raises(Misconfigured, match="no Redis answers at redis://127") as refused:
        await connect(f"redis://:secret@127.0.0.1:{absent.port}/2")
    assert "secret" not in refused.value.message


async def test_foreign_values_in_its_keys_cost_no_worker(redis: RedisServer) -> None:
    supervisor, client = await supervised(redis), await connect(redis.url)
    async with gateway(redis) as (members, discovery):
        await supervisor.announce("decode-0", "h:1")
        await members.until(lambda: members.addresses.get("decode-0") == "h:1")
        await client.set(KEYS.announced, b"\xff\xfe")
        await supervisor.announce("decode-1", "h:2")
        await members.until(lambda: "decode-1" in members.addresses)
        assert (members.left, discovery.trouble) == ([], "")
    await client.aclose()
    await supervisor.redis.close()


async def test_the_password_may_be_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, "--requirepass", "s3cret")
    server.start()
    try:
        with pytest.raises(Misconfigured, match=r"requires one: .* environment variable BATON_REDIS_PASSWORD"):
            await connect(server.url)
        monkeypatch.setenv("BATON_REDIS_PASSWORD", "s3cret")
        client = await connect(server.url)
        assert await client.ping()
        await client.aclose()
    finally:
        server.stop()
