"""A worker around a model one can compute by hand, and a gateway's end of its stream, for tests over real gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from kvtransfer.events import EventLog
from protos import worker_pb2, worker_pb2_grpc
from protos.errors import TransferFailed
from protos.values import (
    GenerateRequest,
    Hello,
    KVLayout,
    LaneAddress,
    SamplingParams,
    SequenceUpdate,
    StepMessage,
    WorkerInfo,
    WorkerRole,
)
from protos.wire import from_proto, to_proto
from tests.unit.workers.sync_pipeline import Runner, SyncPipeline
from workers.batch import Batch, StepOutput
from workers.engine.engine import Engine
from workers.kv.block_pool import BlockPool
from workers.rpc.worker import WorkerParts
from workers.scheduling.request import Request
from workers.scheduling.role import Disposition, Role, Tick
from workers.scheduling.scheduler import Scheduler
from workers.worker_config import SchedulerConfig

WEIGHT, VOCAB, BLOCK, NUM_BLOCKS = 5, 97, 4, 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200)


class Breaks:
    """A machine that fails in the middle of a step."""

    def run(self, batch: Batch) -> StepOutput:
        raise RuntimeError("the device is on fire")


class Gate:
    """A runner that computes only while `open`, so that a test decides what happens during a step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def run(self, batch: Batch) -> StepOutput:
        self.entered.set()
        assert self.open.wait(30)
        return self._runner.run(batch)


class HandsOver(Role):
    """Makes first tokens, and then finds that their KV cannot be passed on."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def after_prefill(self, request: Request) -> Disposition:
        self._held.append(request.request_id)
        return Disposition.HOLD

    def tick(self, now: float, num_in_flight: int) -> Tick:
        failed = tuple((request_id, TransferFailed("the lane is gone")) for request_id in self._held)
        self._held.clear()
        return Tick(failed=failed)

    def busy(self) -> bool:
        return bool(self._held)


class Slow:
    """A runner whose step takes longer than a message on its way, as real ones do."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, batch: Batch) -> StepOutput:
        time.sleep(0.005)
        return self._runner.run(batch)


def parts_of(runner: Runner, role: Role | None = None) -> WorkerParts:
    events = EventLog(1)
    pool = BlockPool(NUM_BLOCKS, BLOCK, events.record)
    config = SchedulerConfig(max_model_len=NUM_BLOCKS * BLOCK, vocab_size=VOCAB)
    engine = Engine(Scheduler(config, pool, role or Role()), SyncPipeline(runner), events=events, clock=time.monotonic)
    lane = LaneAddress(worker_id="w", incarnation=1, host="127.0.0.1", port=0)
    layout = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype="float32")
    info = WorkerInfo(
        worker_id="w",
        incarnation=1,
        role=WorkerRole.COLOCATED,
        model="toy",
        address="",
        layout=layout,
        lane=lane,
        max_model_len=config.max_model_len,
        vocab_size=VOCAB,
    )
    return WorkerParts(info=info, engine=engine, close=lambda: None)


class Gateway:
    """One gateway's end of the stream."""

    def __init__(self, address: str, name: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self._out.put_nowait(worker_pb2.ToWorker(hello=to_proto(Hello(gateway_id=name))))
        self.messages: list[StepMessage] = []
        self._call = self.stub.Stream(self._sending())

    async def _sending(self) -> AsyncIterator[Any]:
        while (message := await self._out.get()) is not None:
            yield message

    def submit(self, request_id: str, prompt_ids: tuple[int, ...], sampling: SamplingParams = GREEDY) -> None:
        request = GenerateRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling)
        self._out.put_nowait(worker_pb2.ToWorker(submit=to_proto(request)))

    def submit_together(self, prompts: Mapping[str, tuple[int, ...]]) -> None:
        """By one message."""
        asked = [GenerateRequest(request_id=value, prompt_ids=ids, sampling=GREEDY) for value, ids in prompts.items()]
        first, *further = [worker_pb2.ToWorker(submit=to_proto(query)) for query in asked]
        first.further.extend(further)
        self._out.put_nowait(first)

    async def read(self) -> StepMessage:
        message = from_proto(StepMessage, await self._call.read())
        self.messages.append(message)
        return message

    async def until_finished(self, request_id: str) -> list[SequenceUpdate]:
        seen: list[SequenceUpdate] = []
        while not seen or seen[-1].finish_reason is None:
            seen += [update for update in (await self.read()).updates if update.request_id == request_id]
        return seen

    async def close(self) -> None:
        self._call.cancel()
        await self.channel.close(None)


async def idle(gateway: Gateway) -> None:
    """Returns once the worker holds no request; the test's timeout is the bound."""
    while True:
        stats = await gateway.stub.Stats(worker_pb2.StatsRequest())
        if stats.load.num_running + stats.load.num_waiting == 0:
            return
        await asyncio.sleep(0)


def tokens(updates: list[SequenceUpdate]) -> tuple[int, ...]:
    return tuple(token for update in updates for token in update.token_ids)
