"""A worker that answers at once and computes nothing, over the real protocol: what is left is the gateway.

    python -m benchmarks.stub_worker --step-ms 20     prints its address, serves until it is killed

Every step gives each running request one token; a request that finds the worker idle has its first one at once.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import uvloop

from protos import worker_pb2_grpc
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

TOKENS = tuple(range(300, 1300))
"""Ordinary words of the demo model's vocabulary."""
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
LOAD = WorkerLoad(num_blocks=10**6, num_free_blocks=10**6, prefill_tokens_per_s=1e7, decode_step_s=0.001)


class Stub(worker_pb2_grpc.WorkerServicer):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.address = ""

    async def Describe(self, request: Any, context: Any) -> Any:
        lane = LaneAddress(worker_id="stub", incarnation=1, host="127.0.0.1", port=0)
        return to_proto(
            WorkerInfo(
                worker_id="stub",
                incarnation=1,
                role=WorkerRole.COLOCATED,
                model="demo",
                address=self.address,
                layout=LAYOUT,
                lane=lane,
                max_model_len=2**20,
                vocab_size=2**17,
                num_blocks=10**6,
                reads_further=True,
            )
        )

    async def Health(self, request: Any, context: Any) -> Any:
        return to_proto(Health(healthy=True))

    async def Reserve(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("a stub serves alone: nobody hands KV over to it")

    Share = Stats = Drain = Abort = Profile = Reserve

    async def Stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        running: dict[str, list[int]] = {}  # request -> tokens made, tokens asked for, number
        arrived = asyncio.Event()
        greeted = asyncio.Event()

        async def read() -> None:
            async for message in (one async for packed in messages for one in (packed, *packed.further)):
                match message.WhichOneof("message"):
                    case "hello":
                        greeted.set()
                    case "submit":
                        request = from_proto(GenerateRequest, message.submit)
                        running[request.request_id] = [0, request.sampling.max_tokens, request.number]
                        arrived.set()
                    case "abort":
                        for request_id in message.abort.request_ids:
                            running.pop(request_id, None)

        reading = asyncio.create_task(read())
        try:
            await greeted.wait()
            events = KVEvents(incarnation=1, first_seq=0, events=(), snapshot=True)
            yield to_proto(StepMessage(events=(events,), load=LOAD))
            step = 0
            while True:
                if not running:
                    arrived.clear()
                    await arrived.wait()
                step += 1
                yield to_proto(_step(step, running))
                if running:
                    await asyncio.sleep(self._step_s)
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading


def _step(step: int, running: dict[str, list[int]]) -> StepMessage:
    updates, numbers, token_ids = list[SequenceUpdate](), list[int](), list[int]()
    for request_id, counts in list(running.items()):
        counts[0] += 1
        finished = counts[0] == counts[1]
        if finished:
            del running[request_id]
        token_id = TOKENS[counts[0] % len(TOKENS)]
        if counts[0] > 1 and not finished and counts[2]:
            numbers.append(counts[2])
            token_ids.append(token_id)
            continue
        reason = FinishReason.LENGTH if finished else None
        updates.append(SequenceUpdate(request_id=request_id, token_ids=(token_id,), finish_reason=reason))
    return StepMessage(
        updates=tuple(updates), load=_load(step, running), numbers=tuple(numbers), token_ids=tuple(token_ids)
    )


def _load(step: int, running: dict[str, list[int]]) -> WorkerLoad:
    return WorkerLoad(
        step=step,
        num_running=len(running),
        num_blocks=LOAD.num_blocks,
        num_free_blocks=LOAD.num_free_blocks,
        prefill_tokens_per_s=LOAD.prefill_tokens_per_s,
        decode_step_s=LOAD.decode_step_s,
    )


async def serve(step_s: float) -> None:
    stub, server = Stub(step_s), grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    worker_pb2_grpc.add_WorkerServicer_to_server(stub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    stub.address = f"127.0.0.1:{port}"
    await server.start()
    print(stub.address, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=20.0)
    uvloop.run(serve(parser.parse_args().step_ms / 1000))
