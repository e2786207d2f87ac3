"""A gateway's pod is replaced in the order in which Kubernetes does it, under streams: none is dropped."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable

import httpx
import pytest

from benchmarks.capacity.streams import whole_text
from cluster.cli.serve import DEMO
from tests.cluster.deployed import Deployed
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, Gate, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_STREAMS, NUM_TOKENS = 50, 8


class Service:
    """Spreads new connections over the endpoints."""

    def __init__(self) -> None:
        self._endpoints: list[str] = []
        self._turn = 0

    def add(self, url: str) -> None:
        self._endpoints.append(url)

    def remove(self, url: str) -> None:
        self._endpoints.remove(url)

    def pick(self) -> str:
        self._turn += 1
        return self._endpoints[self._turn % len(self._endpoints)]


class RolloutStreams:
    """Clients that each send one stream after another over their own connection. `texts` are the answers by client."""

    def __init__(self, service: Service, num_tokens: int) -> None:
        self._service = service
        self._num_tokens = num_tokens
        self.num_whole = 0
        self.dropped: list[str] = []
        self._num_unanswered = Counter[str]()
        self.texts: defaultdict[int, set[str]] = defaultdict(set)

    async def run(self, number: int, over: asyncio.Event) -> None:
        """Sends one stream at least."""
        while True:
            url = self._service.pick()
            self._num_unanswered[url] += 1
            try:
                self.texts[number].add(await self._one(url, list(range(number, number + 4))))
                self.num_whole += 1
            except (httpx.HTTPError, ValueError) as error:
                self.dropped.append(f"client {number} at {url}: {type(error).__name__}: {error}")
                self._num_unanswered[url] = 0
            if over.is_set():
                return

    async def answered(self, url: str) -> None:
        """Returns when the gateway has begun to answer every client that has chosen it, as a `preStop` waits for."""
        while self._num_unanswered[url]:  # noqa: ASYNC110 - clients are tasks of this loop
            await asyncio.sleep(0.01)

    async def _one(self, url: str, prompt: list[int]) -> str:
        async def answers(response: httpx.Response) -> None:
            self._num_unanswered[url] -= 1

        body = {"model": "demo", "prompt": prompt, "max_tokens": self._num_tokens, "temperature": 0.0}
        hooks = {"response": [answers]}
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, event_hooks=hooks) as client:
            return await whole_text(client, body)


def asking(url: str = "") -> httpx.AsyncClient:
    """A connection for each request: a busy client finds that an idle one was closed only when it has sent."""
    return httpx.AsyncClient(base_url=url, timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0))


async def ready(deploy: Callable[..., Deployed], address: str) -> Deployed:
    pod = deploy(
        "gateway", "--model", DEMO["model"], "--served-name", "demo", "--port", "0", "--grpc-port", "0",
        "--worker", address,
    )  # fmt: skip
    url = await asyncio.to_thread(lambda: pod.url)
    async with asking(url) as client, asyncio.timeout(250):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.05)
    return pod


async def all_run(*urls: str, least: int = NUM_STREAMS) -> None:
    """Returns when every client has a stream under way, or the least number of them that is given."""
    async with asking() as client, asyncio.timeout(250):
        num_running = 0.0
        while num_running < least:
            pages = [(await client.get(f"{url}/metrics")).text for url in urls]
            matches = [re.search(r"^baton_requests_in_flight{.*completions.*} (\S+)$", page, re.M) for page in pages]
            num_running = sum(float(match[1]) for match in matches if match)


async def test_a_rollout_of_a_gateway_drops_no_stream(deploy: Callable[..., Deployed]) -> None:
    gate, over, service = Gate(ToyRunner(WEIGHT, BLOCK, VOCAB)), asyncio.Event(), Service()
    worker = Worker(parts_of(gate))
    address = (await worker.start("127.0.0.1")).address
    streams = RolloutStreams(service, NUM_TOKENS)
    try:
        old = await ready(deploy, address)
        service.add(old.url)
        clients = [asyncio.create_task(streams.run(number, over)) for number in range(NUM_STREAMS)]
        new = await ready(deploy, address)
        service.add(new.url)
        gate.open.clear()  # the streams that run now outlast the signal
        service.remove(old.url)
        await all_run(old.url, new.url)  # preStop: each client that has found the old pod is served there
        old.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(old.wait_for, "^stopping")
        gate.open.set()
        assert await asyncio.to_thread(old.ended) == 0, old.log
        over.set()
        await asyncio.gather(*clients)
    finally:
        gate.open.set()
        await worker.stop()
    assert streams.dropped == []
    assert streams.num_whole >= NUM_STREAMS
