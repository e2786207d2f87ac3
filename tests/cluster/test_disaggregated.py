"""The whole way of a token, in one process but over real gRPC and gloo: router, prefill worker, KV, decode worker.

Greedy tokens equal transformers', and the counters prove which worker did what.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from decode_pool.decode_role import DecodeRole
from prefill_pool.prefill_role import PrefillRole
from protos.values import SamplingParams, WorkerRole, WorkerStats
from router.build_router import build_router
from router.dispatch.dispatcher import Dispatcher
from router.fleet.fleet import Fleet
from router.jobs import Job
from router.prefix.feed import Feed
from router.prefix.memory_index import MemoryPrefixIndex
from tests.numerics.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.numerics.engines import GREEDY, oracle_answers
from tests.unit.router.fake_cluster import router_config
from workers.batch import Batch, PendingStep
from workers.parallel.ranks import open_store
from workers.rpc.assembly import assemble, follow
from workers.rpc.worker import Worker
from workers.worker_config import RankId, TransferConfig, WorkerConfig

pytestmark = pytest.mark.cluster

LENGTHS = (1, 5, 15, 16, 33, 64, 100, 150)
Oracle = Callable[[str], tuple[Path, list[list[int]]]]


def prompt_of(length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())


PROMPTS = [prompt_of(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracles: dict[str, tuple[Path, list[list[int]]]] = {}

    def ask(family: str) -> tuple[Path, list[list[int]]]:
        if family not in oracles:
            folder = tmp_path_factory.mktemp(family)
            oracles[family] = folder, oracle_answers(make_checkpoint(family, folder), PROMPTS)
        return oracles[family]

    return ask


@dataclass
class Pair:
    """A prefill and a decode worker behind a dispatcher that never lets decode read a prompt."""

    fleet: Fleet
    dispatcher: Dispatcher
    workers: dict[str, Worker] = field(default_factory=dict)
    num_jobs: int = 0

    async def answer(self, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY) -> list[int]:
        self.num_jobs += 1
        job = Job(request_id=f"job-{self.num_jobs}", group_id="g", prompt_ids=prompt, sampling=sampling)
        return [token async for delta in self.dispatcher(job) for token in delta.token_ids]

    async def answers(self, prompts: list[tuple[int, ...]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
        return await asyncio.gather(*[self.answer(prompt, sampling) for prompt in prompts])

    async def stats(self, worker_id: str) -> WorkerStats:
        return await self.fleet.stats(worker_id)

    async def settle(self) -> None:
        """Returns once both workers hold nothing for anybody; the test's timeout is the bound."""
        for worker_id in self.workers:
            while True:
                load = (await self.stats(worker_id)).load
                if (
                    load.num_running + load.num_waiting + load.num_tickets == 0
                    and load.num_free_blocks == load.num_blocks
                ):
                    break
                await asyncio.sleep(0.01)


def config_for(folder: Path, **settings: Any) -> WorkerConfig:
    return replace(WorkerConfig(model=str(folder), device="cpu", dtype="float32", num_blocks=160), **settings)


async def start(
    worker_id: str, config: WorkerConfig, transfers: TransferConfig | None = None
) -> tuple[Worker, list[threading.Thread]]:
    """Ranks above 0 follow in threads of this process."""
    port = _free_port() if config.tp > 1 else 0
    rank_ids = [
        RankId(
            worker_id=worker_id, incarnation=1, rank=rank, size=config.tp, store_port=port, store_key=b"of these ranks"
        )
        for rank in range(config.tp)
    ]
    followers = [threading.Thread(target=follow, args=(config, rank_id), daemon=True) for rank_id in rank_ids[1:]]
    for follower in followers:
        follower.start()
    kind = WorkerRole(worker_id.partition("-")[0])
    role = PrefillRole if kind is WorkerRole.PREFILL else DecodeRole
    worker = Worker(await asyncio.to_thread(assemble, config, rank_ids[0], kind=kind, role=role, transfers=transfers))
    await worker.start("127.0.0.1")
    return worker, followers


def _free_port() -> int:
    store = open_store("127.0.0.1")
    store.close()
    return store.port


@asynccontextmanager
async def pair_of(
    folder: Path,
    prefilling: WorkerConfig,
    decoding: WorkerConfig,
    role: TransferConfig | None = None,
    **routing: Any,
) -> AsyncIterator[Pair]:
    router = router_config(folder, "m", local_prefill_tokens=0, **routing)
    built = build_router(router, feed=Feed(MemoryPrefixIndex(), gateway_id="test"))
    fleet, pair = built.fleet, Pair(built.fleet, built.dispatcher)
    followers: list[threading.Thread] = []
    for worker_id, config, transfers in (("prefill-0", prefilling, role), ("decode-0", decoding, None)):
        pair.workers[worker_id], more = await start(worker_id, config, transfers)
        followers += more
        fleet.add_worker(pair.workers[worker_id].info.address, worker_id=worker_id)
    clock = asyncio.get_running_loop().time
    while len([worker for worker in fleet.status() if worker.state == "ready"]) < 2:
        await fleet.offers.wait(until=clock() + 30)
    try:
        yield pair
        await pair.settle()
    finally:
        await fleet.close()
        for worker in pair.workers.values():
            await worker.stop()
    for worker in pair.workers.values():  # a chunk that was on the wire when its ticket ended may still lie unpolled
        worker._parts.engine.scheduler.assert_idle()
        assert not worker._parts.tickets(0.0)
    for follower in followers:
        await asyncio.to_thread(follower.join, 30)
        assert not follower.is_alive(), "a rank did not end with rank 0"


@pytest.mark.parametrize(
    ("family", "prefill_chunk"), [("llama", 16), ("llama", 512), ("mistral", 16), ("deepseek_v3", 512)]
)
async def test_greedy_tokens_are_the_oracles(oracle: Oracle, family: str, prefill_chunk: int) -> None:
    folder, expected = oracle(family)
    config = config_for(folder, prefill_chunk=prefill_chunk)
    async with pair_of(folder, config, config) as pair:
        assert await pair.answers(PROMPTS) == expected
        cold = await pair.stats("decode-0")
        assert await pair.answers(PROMPTS) == expected
        warm = await pair.stats("decode-0")
        block_bytes = warm.info.layout.block_bytes
        whole = block_bytes * sum(-(-length // 16) for length in LENGTHS)
        rest = block_bytes * sum(length % 16 > 0 for length in LENGTHS)
        moved = (cold.load.transfer_bytes, warm.load.transfer_bytes - cold.load.transfer_bytes)
        if family == "mistral":  # all its layers have a window: what has left it stays behind
            assert 0 < moved[0] < whole
            assert moved[1] == rest
        else:
            assert moved == (whole, rest)


@pytest.mark.parametrize(
    ("family", "tp", "tp_there", "size", "size_there"),
    [
        ("llama", 2, 2, 16, 16),
        ("llama", 1, 2, 16, 16),
        ("llama", 2, 1, 8, 16),
        ("llama", 1, 1, 32, 8),
        ("deepseek_v3", 1, 4, 16, 8),
        ("deepseek_v3", 2, 1, 16, 16),
    ],
)
async def test_unlike_pools_hand_over_every_heads_kv(
    oracle: Oracle, family: str, tp: int, tp_there: int, size: int, size_there: int
) -> None:
    """Block by block as the prompt is read, and the layers of its last step one by one."""
    folder, expected = oracle(family)
    prefilling, decoding = (
        config_for(folder, tp=ranks, block_size=tokens, num_blocks=160 * 16 // tokens, prefill_chunk=64)
        for ranks, tokens in ((tp, size), (tp_there, size_there))
    )
    async with pair_of(folder, prefilling, decoding, TransferConfig(group_bytes=1)) as pair:
        assert await pair.answers(PROMPTS) == expected
        loads = [(await pair.stats(worker_id)).load for worker_id in ("prefill-0", "decode-0")]
        assert loads[0].transfer_bytes == loads[1].transfer_bytes > 0, "what one rank sent is not what the worker did"
        load = loads[0]
        assert 0 <= load.transfer_hidden_s <= load.transfer_s, "more is hidden than has travelled"


async def test_preemption_on_a_decode_worker_changes_no_token(oracle: Oracle) -> None:
    folder, expected = oracle("llama")
    async with pair_of(folder, config_for(folder), config_for(folder, num_blocks=22)) as pair:
        assert await pair.answers(PROMPTS) == expected


async def test_sampled_tokens_depend_on_the_seed_not_on_the_batch(oracle: Oracle) -> None:
    folder, _ = oracle("llama")
    config = config_for(folder)
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, repetition_penalty=1.2)
    async with pair_of(folder, config, config) as pair:
        alone = await pair.answer(PROMPTS[4], sampling)
        together = await pair.answers([*PROMPTS, PROMPTS[4]], sampling)
        other = await pair.answer(PROMPTS[4], replace(sampling, seed=8))
    assert together[4] == together[-1] == alone
    assert other != alone


async def test_a_client_that_leaves_frees_both_pools(oracle: Oracle) -> None:
    folder, _ = oracle("llama")
    config = config_for(folder)
    sampling = replace(GREEDY, max_tokens=400)
    async with pair_of(folder, config, config) as pair:
        job = Job(request_id="left", group_id="g", prompt_ids=PROMPTS[-1], sampling=sampling)
        stream = pair.dispatcher(job)
        async for delta in stream:
            if delta.token_ids:
                break
        await stream.aclose()
        await pair.settle()


async def test_a_prompt_may_wait_longer_than_a_lease(oracle: Oracle) -> None:
    folder, expected = oracle("llama")
    config = config_for(folder)
    lease_s = 2.0  # a busy machine may stand still for one
    async with pair_of(folder, config, config, ticket_lease_s=lease_s) as pair:
        with gated(pair.workers["prefill-0"]) as gate:
            asking = asyncio.create_task(pair.answers(PROMPTS))
            oldest_s = 0.0
            while oldest_s < 1.5 * lease_s and not asking.done():
                tickets = (await pair.stats("decode-0")).tickets
                oldest_s = max((ticket.age_s for ticket in tickets), default=0.0)
                assert pair.dispatcher.num_resumed == 0, "a ticket ended because its prompt had to wait"
                await asyncio.sleep(0.01)
            gate.set()
            assert await asking == expected
        assert pair.dispatcher.num_resumed == 0


@contextmanager
def gated(worker: Worker) -> Iterator[threading.Event]:
    """The worker computes nothing until the gate is open."""
    gate = threading.Event()
    steps = worker._parts.engine._pipeline
    launch = steps.launch

    def wait(batch: Batch) -> PendingStep:
        gate.wait()
        return launch(batch)

    with patch.object(steps, "launch", wait):
        try:
            yield gate
        finally:
            gate.set()


async def test_an_answer_of_one_token_never_reaches_decode(oracle: Oracle) -> None:
    folder, expected = oracle("llama")
    config = config_for(folder)
    async with pair_of(folder, config, config) as pair:
        assert await pair.answer(PROMPTS[5], replace(GREEDY, max_tokens=1)) == expected[5][:1]
        await pair.settle()
        assert (await pair.stats("decode-0")).load.step == 0
