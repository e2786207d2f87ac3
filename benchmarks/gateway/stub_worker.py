"""Runs a worker that answers at once and computes nothing, over the real protocol, so that the gateway is measured."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import uvloop

from protos import worker_pb2, worker_pb2_grpc
from protos.values import (
    FinishReason,
    GenerateRequest,
    Health,
    KVEvents,
    KVLayout,
    LaneAddress,
    SequenceUpdate,
    StepMessage,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
)
from protos.wire import from_proto, to_proto

TOKENS = tuple(range(300, 556))
"""Ordinary words of the demo model's vocabulary, one after another."""
LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
LOAD = WorkerLoad(num_blocks=10**6, num_free_blocks=10**6, prefill_tokens_per_s=1e7, decode_step_s=0.001)


class StubWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.address = ""

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id="stub",
            incarnation=1,
            role=WorkerRole.COLOCATED,
            model="demo",
            address=self.address,
            layout=LAYOUT,
            lane=LaneAddress(worker_id="stub", incarnation=1, host="127.0.0.1", port=0),
            max_model_len=2**20,
            vocab_size=2**17,
            num_blocks=10**6,
            reads_further=True,
        )

    async def Describe(self, request: Any, context: Any) -> Any:
        return to_proto(self.info())

    async def Health(self, request: Any, context: Any) -> Any:
        return to_proto(Health(healthy=True))

    async def Reserve(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("a stub serves whole requests: no KV is handed over to it")

    Share = Stats = Drain = ChangeRole = Abort = Profile = LoadAdapter = UnloadAdapter = Reserve

    async def Stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        running = StubStreams()
        arrived = asyncio.Event()
        greeted = asyncio.Event()

        async def read() -> None:
            async for message in (one async for packed in messages for one in (packed, *packed.further)):
                match message.WhichOneof("message"):
                    case "hello":
                        greeted.set()
                    case "submit":
                        request = from_proto(GenerateRequest, message.submit)
                        running.add(request.request_id, request.sampling.max_tokens, request.number)
                        arrived.set()
                    case "abort":
                        for request_id in message.abort.request_ids:
                            running.drop(request_id)

        reading = asyncio.create_task(read())
        try:
            await greeted.wait()
            events = KVEvents(incarnation=1, first_seq=0, events=(), snapshot=True)
            yield to_proto(StepMessage(events=(events,), load=LOAD))
            due_s = 0.0
            while True:
                if not running:
                    arrived.clear()
                    await arrived.wait()
                yield running.step()
                if running:
                    now = asyncio.get_running_loop().time()
                    due_s = max(due_s + self._step_s, now)  # a step that is begun late does not put off those after it
                    await asyncio.sleep(due_s - now)
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading


class StubStreams:
    """The requests that get a token with each step, all the same one. Those that neither begin nor end with it cost
    nothing but their place in a list, which is made anew only when some have come or gone."""

    def __init__(self) -> None:
        self._step = 0
        self._begun: dict[str, tuple[int, int]] = {}  # name -> step that ends it, number
        self._begins: list[str] = []
        self._ends: dict[int, list[str]] = {}
        self._plain: list[int] | None = None  # numbers of those between their first token and their last

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, request_id: str, num_tokens: int, number: int) -> None:
        """With `number` 0 the tokens are sent by the name of the request."""
        end = self._step + num_tokens
        self._begun[request_id] = end, number
        self._begins.append(request_id)
        self._ends.setdefault(end, []).append(request_id)

    def drop(self, request_id: str) -> None:
        if self._begun.pop(request_id, None) is not None:
            self._plain = None

    def step(self) -> worker_pb2.StepMessage:
        self._step += 1
        token_id = TOKENS[self._step % len(TOKENS)]
        begins, self._begins = self._begins, []
        ends = self._ends.pop(self._step, [])
        told: dict[str, FinishReason | None] = {name: None for name in begins if name in self._begun}
        told |= {name: FinishReason.LENGTH for name in ends if name in self._begun}
        if told or self._plain is None:
            self._plain = [number for name, (_, number) in self._begun.items() if number and name not in told]
            told |= {name: None for name, (_, number) in self._begun.items() if not number and name not in told}
        for name in ends:
            self._begun.pop(name, None)
        message = worker_pb2.StepMessage(
            numbers=self._plain, token_ids=[token_id] * len(self._plain), load=to_proto(self._load())
        )
        for name, reason in told.items():
            update = SequenceUpdate(request_id=name, token_ids=(token_id,), finish_reason=reason)
            message.updates.append(to_proto(update))
        if told:
            self._plain = None
        return message

    def _load(self) -> WorkerLoad:
        return replace(LOAD, step=self._step, num_running=len(self._begun))


async def serve(stub: StubWorker) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    worker_pb2_grpc.add_WorkerServicer_to_server(stub, server)
    stub.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(stub.address, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    uvloop.run(serve(StubWorker(parser.parse_args().step_ms / 1000)))
