"""The simulator's Redis answers what gateways ask as a real one does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cluster.simulate.world.fake_redis import FakeRedisClient, Server
from protos.chain import Chain
from protos.values import BlockStored, KVEvents
from router.prefix.redis_store import EventEntry, PromptEntry, Store, StreamPositions
from router.prefix.redis_url import parse
from tests.cluster.redis_server import RedisServer

CHAIN = Chain.of([bytes([number]) * 16 for number in range(3)])


def told(first_seq: int, *, incarnation: int = 3, snapshot: bool = False) -> KVEvents:
    events = (BlockStored(hashes=CHAIN),)
    return KVEvents(incarnation=incarnation, first_seq=first_seq, events=events, snapshot=snapshot)


async def conversation(store_of: Callable[[str], Store]) -> Sequence[Any]:
    """All calls of a store by two gateways, with the answers, without the numbers of entries."""
    first, other, said = store_of("one"), store_of("other"), list[Any]()

    async def ask(question: Awaitable[Any]) -> None:
        said.append(await question)

    await ask(first.acquire("w", 3))
    await ask(other.acquire("w", 3))
    await ask(first.acquire("v", 1))
    await ask(first.append("w", [told(0), told(1)]))
    await ask(other.append("w", [told(2)]))
    await ask(other.snapshot("w"))
    await ask(first.write("w", told(2, snapshot=True)))
    await ask(other.write("w", told(2, snapshot=True)))
    await ask(first.renew(["w", "v"]))
    await ask(other.renew(["w", "v", "u"]))
    await ask(first.expect("w", CHAIN, for_s=2.0))
    await ask(first.worker_ids())
    await ask(first.holders(["w", "u", "v"]))
    await ask(other.holders([]))
    snapshot = await other.snapshot("w")
    said.append(snapshot and snapshot[0])
    places = StreamPositions()
    entries = await other.read(places, wait=True)
    said += [(entry, entry.message() if isinstance(entry, EventEntry) else None) for entry in entries]
    assert [type(entry) for entry in entries] == [EventEntry, EventEntry, PromptEntry]
    ends = await first.ends()
    assert places == ends
    await ask(other.read(places, wait=False))
    await ask(first.append("w", [told(3)]))
    await ask(other.read(places, wait=True))
    await ask(other.release("w"))
    await ask(first.release("w"))
    await ask(other.acquire("w", 2))
    await ask(other.acquire("w", 4))
    await ask(other.write("w", told(0, incarnation=4, snapshot=True)))
    await ask(other.tidy("w"))
    await ask(first.worker_ids())
    await ask(other.release("w"))
    await ask(other.tidy("w"))
    await ask(first.worker_ids())
    await ask(first.snapshot("w"))
    for store in (first, other):
        await store.close()
    return said


async def test_it_answers_as_a_real_one_does(redis: RedisServer) -> None:
    url, server = parse(redis.url, setting="index"), Server()
    real = await conversation(lambda name: Store(url.client(timeout_s=5.0), model="m", gateway_id=name))
    simulated = await conversation(lambda name: Store(FakeRedisClient(server), model="m", gateway_id=name))
    assert simulated == real
