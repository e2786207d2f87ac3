"""Measures the share of prompts found cached when several gateways route to the same workers.

    one gateway            knows everything: the reference
    shared                 gateways that receive the workers' events, and share what they expect of them through Redis
    events only            gateways that receive the workers' events, and nothing from each other
    own decisions only     gateways that remember what they routed themselves: what unshared peers do

Policy, index, feed, hashes and block pools are the product's, Redis is a real one; a worker is a block pool that takes
time to prefill. Prompts about a document come in bursts, each prompt at a gateway of its own choice.

    python -m benchmarks.gateway.replicas --redis redis://localhost:6379 --json replicas.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean

from benchmarks.output import write_bars
from kvtransfer.events import EventLog
from kvtransfer.hashing import chain_hashes
from protos.chain import Chain
from protos.values import BlockStored, WorkerRole
from router.prefix.feed import Feed
from router.prefix.redis_index import RedisFeed
from router.prefix.registry import MEMORY, open_feed
from router.router_config import RouterConfig
from router.routing.candidate_columns import Candidate, CandidateTable
from router.routing.decision import RequestView
from router.routing.registry import policy_of
from workers.kv.block_pool import BlockPool

BLOCK_SIZE = 16
DOCUMENT_BLOCKS, QUESTION_BLOCKS = 32, 2
SIBLINGS = 6
SIBLING_GAP_S = 0.004  # between siblings: longer than a message to Redis and back
READ_S = 0.0005  # a block
SIBLING_S = 3.0
SPEED = BLOCK_SIZE / READ_S


class SharingWorker:
    def __init__(self, worker_id: str, num_blocks: int) -> None:
        self.worker_id = worker_id
        self.log = EventLog(1, 10**6)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, self.log.record)
        self.hears: list[SharingGateway] = []
        self.num_queued = 0
        self.num_tokens = self.num_cached = 0
        self._turn = asyncio.Lock()

    async def read(self, hashes: Chain, num_uncached: int) -> None:
        """One prompt after the other; every gateway that receives events of this worker knows when one is done."""
        self.num_queued += num_uncached
        async with self._turn:
            cached = self.pool.match(hashes)
            self.pool.acquire(cached)
            fresh = self.pool.allocate(len(hashes) - len(cached))
            assert fresh is not None
            await asyncio.sleep(READ_S * len(fresh))
            for place, block_id in enumerate(fresh, len(cached)):
                self.pool.seal(block_id, hashes[place], hashes[place - 1] if place else b"")
            self.pool.release([*cached, *fresh])
            self.num_queued -= num_uncached
            self.num_tokens += len(hashes)
            self.num_cached += len(cached)
            for gateway in self.hears:
                gateway.hear(self)


class SharingGateway:
    """Decides, and sends the prompt to the worker. `hears`: whether it receives the worker's events."""

    def __init__(self, workers: list[SharingWorker], feed: Feed, hears: bool):
        self.index = feed.index
        self.feed = feed
        self._workers = {worker.worker_id: worker for worker in workers}
        self._hears = hears
        self._policy = policy_of(RouterConfig(model_path=Path("m"), model_name="m", policy="prefix_aware"))
        self._since = dict.fromkeys(self._workers, 0)  # blocks routed there that its load does not show yet
        self._load = dict.fromkeys(self._workers, 0)
        self._num_decided = 0
        for worker in workers:
            worker.hears.append(self)
            if hears:
                self.feed.hello(worker.worker_id, 1)
                self.hear(worker)

    def hear(self, worker: SharingWorker) -> None:
        self._load[worker.worker_id], self._since[worker.worker_id] = worker.num_queued, 0
        if self._hears:
            _, next_seq = self.feed.position(worker.worker_id)
            news = worker.log.since(1, next_seq)
            assert news is not None
            self.feed.receive(worker.worker_id, news)

    def knows(self, hashes: Chain) -> bool:
        matched = self.index.match(hashes, now=asyncio.get_running_loop().time())
        return max(matched.blocks.values(), default=0) == len(hashes)

    def route(self, hashes: Chain) -> Awaitable[None]:
        """The prompt being read by the worker that was chosen."""
        now = asyncio.get_running_loop().time()
        matched = self.index.match(hashes, now=now)
        num_tokens = len(hashes) * BLOCK_SIZE
        candidates = [
            Candidate(
                worker_id=name,
                role=WorkerRole.COLOCATED,
                num_cached_tokens=min(matched.blocks.get(name, 0) * BLOCK_SIZE, num_tokens - 1),
                queued_prefill_tokens=(self._load[name] + self._since[name]) * BLOCK_SIZE,
                num_free_blocks=worker.pool.num_free,
                num_blocks=worker.pool.num_blocks,
                prefill_tokens_per_s=SPEED,
            )
            for name, worker in self._workers.items()
        ]
        view = RequestView(request_id="r", num_tokens=num_tokens, block_size=BLOCK_SIZE, num_decided=self._num_decided)
        chosen = self._policy(view, CandidateTable.of(candidates)).decode
        self._num_decided += 1
        num_uncached = len(hashes) - matched.blocks.get(chosen, 0)
        self._since[chosen] += num_uncached
        if self._hears:
            self.feed.expect(chosen, hashes, until=now + SIBLING_S)
        else:
            self.index.apply(chosen, (BlockStored(hashes=hashes),))
        return self._workers[chosen].read(hashes, num_uncached)


async def hit_rate(
    num_gateways: int,
    *,
    url: str = "",
    hears: bool = True,
    num_bursts: int = 120,
    num_workers: int = 8,
    seed: int = 0,
    settled: bool = False,
) -> float:
    """The share of blocks that were found in a cache. With `url`, gateways share through Redis. `settled`: the next
    prompt comes when every gateway knows where the last one went, however slow this machine is."""
    rng = random.Random(seed)
    workers = [SharingWorker(f"w{number}", num_blocks=400) for number in range(num_workers)]
    async with AsyncExitStack() as stack:
        gateways = [SharingGateway(workers, _feed(url, number, seed), hears) for number in range(num_gateways)]
        for gateway in gateways:
            await gateway.feed.start()
            stack.push_async_callback(gateway.feed.close)
        if url:
            await _until(lambda: sum(_writes(gateway, workers) for gateway in gateways) == num_workers)
        running: list[asyncio.Future[None]] = []
        for _ in range(num_bursts):
            document = min(int(rng.expovariate(1 / 20)), 119)
            for _ in range(SIBLINGS):
                question = [rng.randrange(2**31) for _ in range(QUESTION_BLOCKS * BLOCK_SIZE)]
                tokens = [document] * (DOCUMENT_BLOCKS * BLOCK_SIZE) + question
                hashes = chain_hashes(tokens, BLOCK_SIZE)
                running.append(asyncio.ensure_future(rng.choice(gateways).route(hashes)))
                await asyncio.sleep(SIBLING_GAP_S)
                if settled:
                    await _until(lambda hashes=hashes: all(gateway.knows(hashes) for gateway in gateways))  # type: ignore[misc]
        await asyncio.gather(*running)
    return sum(worker.num_cached for worker in workers) / sum(worker.num_tokens for worker in workers)


def _feed(url: str, number: int, seed: int) -> Feed:
    return open_feed(url or MEMORY, model=f"replicas-{seed}", gateway_id=f"g{number}")


def _writes(gateway: SharingGateway, workers: list[SharingWorker]) -> int:
    assert isinstance(gateway.feed, RedisFeed)
    return sum(gateway.feed.writes_for(worker.worker_id) for worker in workers)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():  # noqa: ASYNC110 - what is waited for changes in many places
            await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", metavar="URL", help="Default: gateways that share through Redis are left out.")
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Where to write the figures.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Where to draw them (needs matplotlib).")
    given = parser.parse_args()
    cases: dict[str, Callable[[int], Awaitable[float]]] = {
        "one gateway": lambda seed: hit_rate(1, seed=seed),
        f"{given.gateways} gateways, shared": lambda seed: hit_rate(given.gateways, url=given.redis, seed=seed),
        f"{given.gateways} gateways, events only": lambda seed: hit_rate(given.gateways, seed=seed),
        f"{given.gateways} gateways, own decisions only": lambda seed: hit_rate(given.gateways, hears=False, seed=seed),
    }

    if not given.redis:
        del cases[f"{given.gateways} gateways, shared"]

    async def run() -> dict[str, list[float]]:
        return {name: [await case(seed) for seed in range(given.seeds)] for name, case in cases.items()}

    found = asyncio.run(run())
    for name, rates in found.items():
        print(f"{name:32} {mean(rates):6.1%}   ({', '.join(f'{rate:.1%}' for rate in rates)})")
    figures = {name: {f"seed {seed}": rate for seed, rate in enumerate(rates)} for name, rates in found.items()}
    write_bars(figures, unit="share of blocks cached", json_file=given.json, plot=given.plot)


if __name__ == "__main__":
    main()
