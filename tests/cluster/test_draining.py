"""Workers are drained one after the other while clients read: every answer is the one of an undisturbed cluster.

Real gRPC and real lanes in one process; two decode workers behind one prefill worker, and two that do everything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from decode_pool.decode_role import DecodeRole
from prefill_pool.prefill_role import PrefillRole
from protos.values import FinishReason, SamplingParams, WorkerRole
from router.build_router import Router, build_router
from router.dispatch.dispatcher import Dispatcher
from router.fleet.fleet import Fleet
from router.jobs import Job, TokenDelta
from router.prefix.feed import Feed
from router.prefix.memory_index import MemoryPrefixIndex
from router.router_config import RouterConfig
from tests.cluster.test_disaggregated import PROMPTS, config_for, start
from tests.numerics.checkpoints import make_checkpoint
from workers.rpc.assembly import assemble
from workers.rpc.worker import Worker
from workers.worker_config import RankId

pytestmark = pytest.mark.cluster

NUM_TOKENS, HELD_AT = 150, 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(
    temperature=1.0, top_p=0.95, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True,
    repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
)  # fmt: skip
ASKED = [(PROMPTS[2], GREEDY), (PROMPTS[4], SEEDED), (PROMPTS[5], GREEDY), (PROMPTS[6], replace(SEEDED, seed=12))]
NUM_BLOCKS = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


@dataclass
class Cluster:
    folder: Path
    router: Router
    workers: dict[str, Worker] = field(default_factory=dict)
    incarnation: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    """While it is clear, workers whose sequences all have `HELD_AT` tokens wait, so that none ends before its drain."""
    num_jobs: int = 0

    def __post_init__(self) -> None:
        self.released.set()

    @property
    def fleet(self) -> Fleet:
        return self.router.fleet

    @property
    def generate(self) -> Dispatcher:
        return self.router.dispatcher

    async def start(self, worker_id: str) -> None:
        self.incarnation += 1
        role = WorkerRole(worker_id.partition("-")[0])
        open_worker: Any = partial(assemble, kind=role, role=PrefillRole if role is WorkerRole.PREFILL else DecodeRole)
        rank_id = RankId(worker_id=worker_id, incarnation=self.incarnation)
        config = config_for(self.folder, num_blocks=NUM_BLOCKS)
        worker = Worker(await asyncio.to_thread(open_worker, config, rank_id))
        self._hold(worker._parts.engine)
        await worker.start("127.0.0.1")
        self.workers[worker_id] = worker
        self.fleet.add_worker(worker.info.address, worker_id=worker_id)
        await self.until_ready(worker)

    def _hold(self, engine: Any) -> None:
        step = engine.step

        def held(now: float) -> list[Any]:
            lengths = [len(request.output_ids) for request in engine.scheduler.requests()]
            if min(lengths, default=0) < HELD_AT or self.released.wait(0.001):  # orders are read between steps
                updates: list[Any] = step(now)
                return updates
            return []

        engine.step = held

    async def until_ready(self, worker: Worker) -> None:
        clock = asyncio.get_running_loop().time
        life = (worker.info.worker_id, worker.info.incarnation)

        def is_ready(one: Any) -> bool:
            return one.state == "ready" and (one.info.worker_id, one.info.incarnation) == life

        while not any(is_ready(worker) for worker in self.fleet.status()):
            await self.fleet.offers.wait(until=clock() + 30)

    async def replace(self, worker_id: str) -> None:
        """A worker is drained, ended and started again, as by `baton drain` and a supervisor."""
        await self.fleet.drain(worker_id)
        self.released.set()
        worker = self.workers.pop(worker_id)
        await worker.wait()
        await worker.stop()
        worker._parts.engine.assert_idle()
        await self.start(worker_id)

    async def stop(self) -> None:
        await self.fleet.close()
        for worker in self.workers.values():
            await worker.stop()
            worker._parts.engine.scheduler.assert_idle()
            assert not worker._parts.tickets(0.0)


@asynccontextmanager
async def cluster_of(folder: Path, *worker_ids: str) -> AsyncIterator[Cluster]:
    config = RouterConfig(model_path=folder, model_name="m", local_prefill_tokens=0, policy="round_robin")
    cluster = Cluster(folder, build_router(config, feed=Feed(MemoryPrefixIndex(), gateway_id="test")))
    try:
        for worker_id in worker_ids:
            await cluster.start(worker_id)
        yield cluster
    finally:
        await cluster.stop()


class Client:
    """Reads one answer as it comes; `under_way` is set once there is something of it."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        prompt, sampling = ASKED[number]
        cluster.num_jobs += 1
        self.job = Job(request_id=f"job-{cluster.num_jobs}", group_id="g", prompt_ids=prompt, sampling=sampling)
        self.deltas: list[TokenDelta] = []
        self.under_way = asyncio.Event()
        self.reading = asyncio.create_task(self._read(cluster))

    async def _read(self, cluster: Cluster) -> None:
        async for delta in cluster.generate(self.job):
            self.deltas.append(delta)
            if len(self.deltas) > 4:
                self.under_way.set()

    async def answer(self) -> list[int]:
        await self.reading
        assert self.deltas[-1].finish_reason is FinishReason.LENGTH
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def chosen(self) -> list[int]:
        """The ids that the logprobs are of."""
        return [logprob.chosen.token_id for delta in self.deltas for logprob in delta.logprobs]


async def ask_all(cluster: Cluster) -> list[Client]:
    clients = [Client(cluster, number) for number in range(len(ASKED))]
    for client in clients:
        await client.under_way.wait()
    return clients


@pytest.mark.parametrize(
    "worker_ids",
    [("prefill-0", "decode-0", "decode-1"), ("prefill-0", "decode-0"), ("colocated-0", "colocated-1")],
    ids=["pools", "pair", "colocated"],
)
async def test_a_rolling_drain_changes_no_answer(checkpoint: Path, worker_ids: tuple[str, ...]) -> None:
    """The sequences of a pair's decode worker move to its prefill worker, which stands in."""
    async with cluster_of(checkpoint, *worker_ids) as cluster:
        undisturbed = [await client.answer() for client in await ask_all(cluster)]
        for worker_id in worker_ids:
            cluster.released.clear()
            clients = await ask_all(cluster)
            num_moved = cluster.generate.moves.num_moved
            await cluster.replace(worker_id)
            assert [await client.answer() for client in clients] == undisturbed
            for client in clients:
                assert client.chosen == ([] if client.job.sampling.logprobs is None else await client.answer())
            assert (cluster.generate.moves.num_moved > num_moved) == (worker_id != "prefill-0")
        assert cluster.generate.num_resumed == 0, "nobody had to compute anything again"


async def test_a_drained_worker_with_nobody_beside_it_finishes_first(checkpoint: Path) -> None:
    async with cluster_of(checkpoint, "colocated-0") as cluster:
        clients = await ask_all(cluster)
        await cluster.replace("colocated-0")
        assert [len(await client.answer()) for client in clients] == [NUM_TOKENS] * len(clients)
        assert cluster.generate.num_resumed == 0


async def test_a_sequence_moves_to_a_worker_of_another_tensor_parallelism(checkpoint: Path) -> None:
    async with cluster_of(checkpoint, "colocated-0") as cluster:
        undisturbed = [await client.answer() for client in await ask_all(cluster)]
        split, followers = await start("decode-1", config_for(checkpoint, num_blocks=NUM_BLOCKS, tp=2))
        cluster.workers["decode-1"] = split
        cluster.fleet.add_worker(split.info.address, worker_id="decode-1")
        await cluster.until_ready(split)
        clients = await ask_all(cluster)
        await cluster.fleet.drain("decode-1")
        await split.wait()
        assert [await client.answer() for client in clients] == undisturbed
        assert cluster.generate.moves.num_moved > 0
        assert cluster.generate.num_resumed == 0
        await cluster.workers.pop("decode-1").stop()
    for follower in followers:
        await asyncio.to_thread(follower.join, 30)
        assert not follower.is_alive(), "a rank did not end with rank 0"
