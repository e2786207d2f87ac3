"""Gateways that share what workers say through a real Redis, whatever happens to it, to them, or to a worker.

The workers are block pools that speak as the real ones do: numbered events, replay of what is kept, else a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NoReturn

import pytest
from redis.asyncio import Redis

from kvtransfer.events import EventLog
from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.values import BlockRemoved, BlockStored, Hello, KVEvents, Tier
from router.prefix import redis_index as prefix_redis
from router.prefix.redis_index import RedisFeed
from router.prefix.redis_store import Store
from router.prefix.redis_url import parse
from router.prefix.table_index import TablePrefixIndex
from tests.cluster.redis_server import RedisServer
from workers.kv.block_pool import BlockPool

pytestmark = pytest.mark.cluster

LEASE_S = 0.6
TIMEOUT_S = 0.8  # of a command: longer than a read waits
PATIENCE_S = 20.0
BLOCK_SIZE = 4


class Worker:
    """Reads prompts into its cache and tells whoever has met it."""

    def __init__(self, worker_id: str, *, incarnation: int = 1, num_blocks: int = 64, kept: int = 4096) -> None:
        self.worker_id = worker_id
        self.log = EventLog(incarnation, kept)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, self.log.record)
        self._told: dict[str, tuple[Gateway, int]] = {}
        self.num_snapshots = 0

    def meet(self, gateway: Gateway) -> None:
        """The gateway subscribes to the worker's events."""
        self._answer(gateway, gateway.feed.hello(self.worker_id, self.log.incarnation))

    def read(self, *prompts: range) -> None:
        for prompt in prompts:
            hashes = chain(prompt)
            cached = self.pool.match(hashes)
            self.pool.acquire(cached)
            fresh = self.pool.allocate(len(hashes) - len(cached))
            assert fresh is not None
            for place, block_id in enumerate(fresh, len(cached)):
                self.pool.seal(block_id, hashes[place], hashes[place - 1] if place else b"")
            self.pool.release([*cached, *fresh])
        self.tell()

    def evict_to_host(self, prompt: range, *, keep: int) -> None:
        """The worker reports that all but the first blocks of a prompt went to the host."""
        hashes = chain(prompt)
        self.log.record(BlockStored(hashes=hashes[keep:], parent=hashes[keep - 1], tier=Tier.HOST))
        self.log.record(BlockRemoved(hashes=hashes[keep:]))
        self.tell()

    def tell(self) -> None:
        for gateway, next_seq in list(self._told.values()):
            news = self.log.since(self.log.incarnation, next_seq)
            assert news is not None
            self._send(gateway, news)

    def leave(self, gateway: Gateway) -> None:
        """The gateway's stream of events ends."""
        del self._told[gateway.gateway_id]
        gateway.feed.lost(self.worker_id)

    def _answer(self, gateway: Gateway, hello: Hello) -> None:
        news = self.log.since(hello.incarnation, hello.next_seq)
        if news is None:
            self.num_snapshots += 1
            news = self.log.snapshot(self.pool.snapshot())
        self._send(gateway, news)

    def _send(self, gateway: Gateway, news: KVEvents) -> None:
        self._told[gateway.gateway_id] = (gateway, self.log.next_seq)
        hello = gateway.feed.receive(self.worker_id, news)
        if hello is not None:
            self._answer(gateway, hello)


class Gateway:
    """The parts of a gateway that use the index."""

    def __init__(self, gateway_id: str, url: str, *, max_entries: int = 4096) -> None:
        self.gateway_id = gateway_id
        store = Store(
            parse(url, setting="index").client(timeout_s=TIMEOUT_S),
            model="toy",
            gateway_id=gateway_id,
            lease_s=LEASE_S,
            max_entries=max_entries,
        )
        self.feed = RedisFeed(TablePrefixIndex(), store)
        self.index = self.feed.index
        self.routed: list[tuple[str, int, int]] = []  # by other gateways

        def routed(*prompt: Any) -> None:
            self.routed.append(prompt)

        self.feed.routed = routed

    def matched(self, prompt: range) -> dict[str, int]:
        return dict(self.index.match(chain(prompt), now=asyncio.get_running_loop().time()).blocks)


def chain(prompt: range, salt: bytes = b"") -> Chain:
    return chain_hashes(prompt, BLOCK_SIZE, salt=salt)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for changes in many places
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(*gateways: Gateway) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for gateway in gateways:
            stack.push_async_callback(gateway.feed.close)
            await gateway.feed.start()
        yield


def knows(gateway: Gateway, prompts: Iterable[range], worker_id: str = "w") -> Callable[[], bool]:
    wanted = list(prompts)
    return lambda: all(gateway.matched(prompt).get(worker_id) == len(prompt) // BLOCK_SIZE for prompt in wanted)


PROMPTS = [range(start, start + 40) for start in range(0, 500, 100)]


async def test_a_new_gateway_starts_with_the_others_events(redis: RedisServer) -> None:
    """From a snapshot and what was told after it; the worker itself then has nothing to repeat."""
    worker, first, second = Worker("w"), Gateway("g1", redis.url), Gateway("g2", redis.url)
    worker.read(*PROMPTS[:2])
    async with opened(first):
        worker.meet(first)
        worker.evict_to_host(PROMPTS[0], keep=2)
        await until(lambda: first.feed.writes_for("w"))
        worker.read(*PROMPTS[2:])
        worker.evict_to_host(PROMPTS[2], keep=1)
        await until(lambda: first.feed.num_entries > 0)
        async with opened(second):
            assert knows(second, PROMPTS)()
            now = asyncio.get_running_loop().time()
            for prompt, on_device in ((PROMPTS[0], {"w": 2}), (PROMPTS[1], {}), (PROMPTS[2], {"w": 1})):
                assert second.index.match(chain(prompt), now=now).on_device == on_device
            assert second.index.num_on_host("w") == first.index.num_on_host("w") > 0
            assert second.feed.position("w") == first.feed.position("w")
            before = worker.num_snapshots
            worker.meet(second)
            assert worker.num_snapshots == before
            assert second.feed.num_gaps == 0
            assert knows(second, PROMPTS)()


async def test_a_gateway_follows_a_worker_that_only_another_one_hears(redis: RedisServer) -> None:
    worker, near, far = Worker("w", num_blocks=20), Gateway("near", redis.url), Gateway("far", redis.url)
    async with opened(near, far):
        worker.meet(near)
        for prompt in PROMPTS:  # two of them fit
            worker.read(prompt)
        await until(lambda: far.feed.position("w") == worker_position(worker))
        assert [far.matched(prompt) for prompt in PROMPTS] == [near.matched(prompt) for prompt in PROMPTS]
        assert [bool(far.matched(prompt)) for prompt in PROMPTS] == [False, False, False, True, True]
        worker.pool.clear()
        worker.tell()
        await until(lambda: not far.matched(PROMPTS[-1]))


async def test_a_burst_is_expected_together_at_every_gateway(redis: RedisServer) -> None:
    worker, first, second = Worker("w"), Gateway("g1", redis.url), Gateway("g2", redis.url)
    async with opened(first, second):
        worker.meet(first)
        worker.meet(second)
        now = asyncio.get_running_loop().time()
        first.feed.expect("w", chain(PROMPTS[0]), until=now + 60.0)
        await until(knows(second, PROMPTS[:1]))
        first.feed.expect("w", chain(PROMPTS[0]), until=now + 60.0)
        length = len(chain(PROMPTS[0]))
        await until(lambda: second.routed == [("w", length, 0), ("w", length, length)])
        assert not first.routed
        first.feed.expect("w", chain(PROMPTS[1]), until=now + 0.2)
        await until(lambda: not second.matched(PROMPTS[1]) and asyncio.get_running_loop().time() > now + 0.2)


async def test_tenants_share_nothing_through_redis_either(redis: RedisServer) -> None:
    worker, first, second = Worker("w"), Gateway("g1", redis.url), Gateway("g2", redis.url)
    async with opened(first, second):
        worker.meet(first)
        worker.read(*PROMPTS)
        await until(knows(second, PROMPTS))
        salted = chain(PROMPTS[0], salt=b"tenant")
        assert second.index.match(salted, now=asyncio.get_running_loop().time()).blocks == {}


async def test_a_dead_workers_blocks_expire_with_its_lease(redis: RedisServer) -> None:
    worker, near, far = Worker("w"), Gateway("near", redis.url), Gateway("far", redis.url)
    async with opened(near, far):
        worker.meet(near)
        worker.read(*PROMPTS)
        await until(knows(far, PROMPTS))
        worker.leave(near)
        await until(lambda: not far.feed.worker_ids and not near.feed.worker_ids)
        assert far.matched(PROMPTS[0]) == near.matched(PROMPTS[0]) == {}
        async with Redis.from_url(redis.url, decode_responses=True) as client:
            keys = [str(key) for key in await client.keys("*")]
        assert not [key for key in keys if "blocks:w" in key or "lease:w" in key]


async def test_another_gateway_takes_over_a_dead_ones_lease(redis: RedisServer) -> None:
    worker, first, second = Worker("w"), Gateway("g1", redis.url), Gateway("g2", redis.url)
    third = Gateway("g3", redis.url)
    async with opened(second, third):
        async with opened(first):
            worker.meet(first)
            worker.read(*PROMPTS[:2])
            await until(lambda: first.feed.writes_for("w"))
            worker.meet(second)
        assert not second.feed.writes_for("w")
        del worker._told["g1"]
        worker.read(*PROMPTS[2:])
        await until(lambda: second.feed.writes_for("w"))
        await until(knows(third, PROMPTS))


async def test_neither_a_paused_gateway_nor_a_former_life_is_believed(redis: RedisServer) -> None:
    def store(gateway_id: str) -> Store:
        client = parse(redis.url, setting="index").client(timeout_s=TIMEOUT_S)
        return Store(client, model="toy", gateway_id=gateway_id, lease_s=60.0)

    def snapshot(incarnation: int) -> KVEvents:
        stored = BlockStored(hashes=chain(PROMPTS[0]))
        return KVEvents(incarnation=incarnation, first_seq=incarnation, events=(stored,), snapshot=True)

    old, new = store("old"), store("new")
    told = KVEvents(incarnation=9, first_seq=9, events=(BlockStored(hashes=chain(PROMPTS[1])),))
    try:
        assert await old.acquire("w", 9)
        assert await old.write("w", snapshot(9))
        assert await old.append("w", [told])
        assert not await new.acquire("w", 10), "one writes for a worker"
        await old.release("w")  # as if its lease had ended while it was paused
        assert await new.acquire("w", 10)
        assert not await old.append("w", [told])
        assert not await old.write("w", snapshot(9))
        assert await old.renew(["w"]) == ["w"]
        assert await new.write("w", snapshot(10))
        await new.release("w")
        assert not await old.acquire("w", 9), "a later life of the worker is known"
        latest = await new.snapshot("w")
        assert latest is not None
        assert latest[0] == snapshot(10)
    finally:
        await old.close()
        await new.close()


async def test_a_late_gateway_is_warm_despite_trimmed_streams(redis: RedisServer) -> None:
    limit = 100
    worker, first = Worker("w", num_blocks=100), Gateway("g1", redis.url, max_entries=limit)
    late = Gateway("g2", redis.url, max_entries=limit)
    async with opened(first):
        worker.meet(first)
        await until(lambda: first.feed.writes_for("w"))
        for number in range(260):
            worker.read(range(number, number + 8))
            heard = first.feed.num_entries
            await until(lambda heard=heard: first.feed.num_entries > heard or bool(first.feed.trouble))  # type: ignore[misc]
        async with Redis.from_url(redis.url) as client:
            assert await client.xlen("baton:{toy}:kv1:events") <= 2 * limit
        async with opened(late):
            assert late.feed.position("w") == worker_position(worker)
            assert late.index.num_blocks("w") == worker.pool.num_cached


async def written(client: Redis) -> None:
    """Returns when an event stands in Redis; the test's timeout is the bound."""
    while True:
        if await client.xlen("baton:{toy}:kv1:events"):
            return
        await asyncio.sleep(0.005)


async def led(client: Redis) -> None:
    """Returns when a gateway writes for the worker; the test's timeout is the bound."""
    while True:
        if await client.exists("baton:{toy}:kv1:lease:w"):
            return
        await asyncio.sleep(0.005)


async def test_a_gateway_says_that_redis_has_forgotten(redis: RedisServer) -> None:
    worker, alone = Worker("w"), Gateway("g1", redis.url)
    async with opened(alone):
        worker.meet(alone)
        worker.read(PROMPTS[0])
        await until(lambda: alone.feed.writes_for("w"))
        async with Redis.from_url(redis.url) as client:
            await client.flushall()
        await until(lambda: alone.feed.num_outages == 1)
        await until(lambda: not alone.feed.trouble)


@pytest.mark.parametrize("fault", ["killed", "paused", "emptied", "emptied under load"])
async def test_routing_goes_on_without_redis_and_sharing_comes_back(redis: RedisServer, fault: str) -> None:
    worker, first, second = Worker("w"), Gateway("g1", redis.url), Gateway("g2", redis.url)
    async with opened(first, second):
        worker.meet(first)
        worker.meet(second)
        worker.read(PROMPTS[0])
        await until(lambda: first.feed.writes_for("w") or second.feed.writes_for("w"))
        if "emptied" in fault:
            async with Redis.from_url(redis.url) as client:
                await written(client)  # or nothing would be lost
                await client.flushall()
                if fault == "emptied under load":
                    worker.read(PROMPTS[1])
                await led(client)  # by either: whoever looks first takes the free lease
        else:
            (redis.stop if fault == "killed" else redis.pause)()
            await until(lambda: "cannot be reached" in first.feed.trouble and "cannot be" in second.feed.trouble)
        worker.read(*PROMPTS[1:3])
        for gateway in (first, second):
            gateway.feed.expect("w", chain(PROMPTS[3]), until=asyncio.get_running_loop().time() + 60.0)
            assert knows(gateway, PROMPTS[:4])()
        if "emptied" not in fault:
            (redis.start if fault == "killed" else redis.resume)()
        await until(lambda: not first.feed.trouble and not second.feed.trouble)
        worker.read(PROMPTS[4])
        late = Gateway("g3", redis.url)
        async with opened(late):
            await until(knows(late, [*PROMPTS[:3], PROMPTS[4]]))
        assert first.feed.num_faults == second.feed.num_faults == 0


async def test_a_gateway_starts_without_redis_and_says_so(redis: RedisServer) -> None:
    redis.stop()
    worker, alone = Worker("w"), Gateway("g1", redis.url)
    alone.feed.warm_s = 0.1
    async with opened(alone):
        assert alone.feed.trouble
        worker.meet(alone)
        worker.read(PROMPTS[0])
        assert knows(alone, PROMPTS[:1])()


def worker_position(worker: Worker) -> tuple[int, int]:
    return (worker.log.incarnation, worker.log.next_seq)


async def test_a_full_redis_is_logged_once_and_always_reported(
    redis: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be read, so every attempt to share seems to succeed."""
    caplog.set_level(logging.INFO, logger="baton.router")
    monkeypatch.setattr(prefix_redis, "PAUSE_S", 0.01)
    monkeypatch.setattr(prefix_redis, "MAX_PAUSE_S", 0.01)
    worker, alone = Worker("w"), Gateway("g1", redis.url)
    told: list[str] = []
    async with opened(alone), Redis.from_url(redis.url) as client:
        worker.meet(alone)
        worker.read(PROMPTS[0])
        await until(lambda: alone.feed.writes_for("w"))
        caplog.clear()
        await client.config_set("maxmemory", "1")
        worker.read(PROMPTS[1])
        await until(lambda: "cannot be used: " in alone.feed.trouble)
        follow = alone.feed._follow

        async def noted() -> NoReturn:
            told.append(alone.feed.trouble)
            await follow()

        monkeypatch.setattr(alone.feed, "_follow", noted)
        await until(lambda: len(told) > 5)
        assert all(told)
        await client.config_set("maxmemory", "0")
        await until(lambda: not alone.feed.trouble)
    lines = [record.message for record in caplog.records]
    assert ["going on with this gateway's own" in line for line in lines] == [True, False], lines
    assert lines[1].startswith("the prefix index is shared through Redis")


async def test_foreign_values_in_its_keys_are_skipped_with_one_line(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="baton.router")
    worker, first, second = Worker("w"), Gateway("g1", redis.url), Gateway("g2", redis.url)
    root = "baton:{toy}:kv1:"
    entry: dict[Any, Any] = {"gateway": "x", "worker": "v", "incarnation": 7, "first": 0, "num": 1}
    async with Redis.from_url(redis.url) as client:
        await client.sadd(root + "workers", b"\xff\xfe", "u", "v")
        await client.hset(root + "blocks:u", "what", "ever")
        await client.hset(root + "blocks:v", mapping={"incarnation": 1, "next": 1, "position": "0-0", "0": b"\xff"})
        async with opened(first, second):
            worker.meet(first)
            for _ in range(50):
                await client.xadd(root + "events", {"what": "ever"})
                await client.xadd(root + "events", entry | {"events": b"\xff\xff"})
                await client.xadd(root + "events", entry | {"incarnation": "x", "events": b""})
                await client.xadd(root + "events", entry | {"incarnation": 2**70, "events": b""})
                await client.xadd(root + "expected", {"gateway": b"\xff", "worker": "w", "for_s": 1, "hashes": b"1"})
                await client.xadd(root + "expected", {"gateway": "x", "worker": "w", "for_s": "nan", "hashes": b"1"})
            worker.read(*PROMPTS[:2])
            await until(knows(second, PROMPTS[:2]))
            assert "no gateway has written it" in second.feed.warning
            assert (first.feed.num_faults, second.feed.num_faults) == (0, 0)
    assert [record.message for record in caplog.records if record.exc_info] == []
    left_out = [record.message for record in caplog.records if "left out" in record.message]
    assert len(left_out) == 2, "one line for each gateway"
