"""A worker over real gRPC, with a model one can compute by hand: what its gateways see."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from protos.errors import InvalidRequest, TransferFailed, Unavailable, WorkerLost
from protos.grpc_status import error_of
from protos.values import (
    BlockStored,
    FinishReason,
    GenerateRequest,
    Health,
    Hello,
    LaneStats,
    ReserveRequest,
    SequenceUpdate,
    StepMessage,
    Ticket,
    WorkerLoad,
)
from protos.wire import from_proto, to_proto
from tests.cluster.toy_worker import (
    BLOCK,
    ENDLESS,
    VOCAB,
    WEIGHT,
    Breaks,
    Gate,
    Gateway,
    HandsOver,
    Slow,
    idle,
    parts_of,
    tokens,
)
from tests.unit.protos.test_listening import needs_ipv6
from tests.unit.workers.toy import ToyRunner, toy_tokens
from workers.rpc.loop import ThreadedEngineLoop
from workers.rpc.worker import Worker, WorkerParts
from workers.rpc.worker_servicer import MAX_BACKLOG_MESSAGES, WorkerServicer

pytestmark = pytest.mark.cluster


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    served = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    await served.start("127.0.0.1")
    yield served
    await served.stop()
    served._parts.engine.assert_idle()


async def test_tokens_come_back_one_message_a_step() -> None:
    worker = Worker(parts_of(Slow(ToyRunner(WEIGHT, BLOCK, VOCAB))))
    await worker.start("127.0.0.1")
    gateway = Gateway(worker.info.address, "g")
    prompts = {f"r{i}": tuple(range(i, i + 9)) for i in range(4)}
    gateway.submit_together(prompts)
    seen: dict[str, list[SequenceUpdate]] = {request_id: [] for request_id in prompts}
    while not all(updates and updates[-1].finish_reason for updates in seen.values()):
        for update in (await gateway.read()).updates:
            seen[update.request_id].append(update)
    for request_id, prompt in prompts.items():
        assert tokens(seen[request_id]) == toy_tokens(prompt, 12, weight=WEIGHT, vocab_size=VOCAB)
        assert seen[request_id][-1].finish_reason is FinishReason.LENGTH
    assert any(len(message.updates) == 4 for message in gateway.messages), "requests of one step share a message"
    await gateway.close()
    await worker.stop()


@needs_ipv6
async def test_a_worker_at_an_address_of_ipv6_is_found_there() -> None:
    served = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    info = await served.start("::1")
    assert info.address.startswith("[::1]:")
    async with grpc.aio.insecure_channel(info.address) as channel:
        described = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
    assert described.address == info.address
    await served.stop()


async def test_gateways_hear_of_their_own_requests_and_of_all_blocks(worker: Worker) -> None:
    first, other = Gateway(worker.info.address, "one"), Gateway(worker.info.address, "other")
    assert (await first.read()).events[0].snapshot
    assert (await other.read()).events[0].snapshot
    first.submit("mine", tuple(range(8)))
    assert tokens(await first.until_finished("mine"))
    heard = await other.read()
    assert not heard.updates
    assert any(isinstance(event, BlockStored) for batch in heard.events for event in batch.events)
    late = Gateway(worker.info.address, "late")
    snapshot = (await late.read()).events[0]
    stored = {hash_ for event in snapshot.events if isinstance(event, BlockStored) for hash_ in event.hashes}
    assert snapshot.snapshot
    assert len(stored) == (8 + 12 - 1) // BLOCK
    for gateway in (first, other, late):
        await gateway.close()


async def test_an_idle_worker_says_that_it_is_idle(worker: Worker) -> None:
    """Also when the last blocks went after the last step, as a prefill worker's do."""
    first, other = Gateway(worker.info.address, "one"), Gateway(worker.info.address, "other")
    await other.read()
    first.submit("r", tuple(range(8)), ENDLESS)
    while not (await first.read()).updates:
        pass
    await first.close()
    load = (await other.read()).load
    while load is None or load.num_running or load.num_free_blocks < load.num_blocks:
        load = (await other.read()).load
    await other.close()


async def test_a_gateway_that_leaves_takes_its_requests_with_it(worker: Worker) -> None:
    leaving, staying = Gateway(worker.info.address, "leaving"), Gateway(worker.info.address, "staying")
    leaving.submit("gone", tuple(range(8)), ENDLESS)
    while not (await leaving.read()).updates:
        pass
    await leaving.close()
    await idle(staying)
    staying.submit("kept", tuple(range(5)))
    assert tokens(await staying.until_finished("kept")) == toy_tokens(
        tuple(range(5)), 12, weight=WEIGHT, vocab_size=VOCAB
    )
    await staying.close()


async def test_an_abort_call_ends_a_request() -> None:
    served = Worker(parts_of(Slow(ToyRunner(WEIGHT, BLOCK, VOCAB))))
    await served.start("127.0.0.1")
    gateway = Gateway(served.info.address, "g")
    gateway.submit("long", tuple(range(8)), ENDLESS)
    while not (await gateway.read()).updates:
        pass
    reply = await gateway.stub.Abort(worker_pb2.AbortRequest(request_ids=["long", "unknown"]))
    assert reply.num_aborted == 1
    await idle(gateway)
    await gateway.close()
    await served.stop()
    served._parts.engine.assert_idle()


async def test_a_bad_request_is_answered_with_its_error(worker: Worker) -> None:
    gateway = Gateway(worker.info.address, "g")
    gateway.submit("bad", (1, VOCAB))
    (update,) = await gateway.until_finished("bad")
    assert update.finish_reason is FinishReason.ERROR
    assert update.error is not None
    assert update.error.code == "invalid_request"
    assert str(VOCAB) in update.error.message
    await gateway.close()


async def test_a_draining_worker_finishes_and_takes_nothing_new(worker: Worker) -> None:
    gateway = Gateway(worker.info.address, "g")
    gateway.submit("old", tuple(range(8)))
    while not (await gateway.read()).updates:
        pass
    await gateway.stub.Drain(worker_pb2.DrainRequest())
    gateway.submit("new", tuple(range(8)))
    updates: list[SequenceUpdate] = [update for message in gateway.messages for update in message.updates]
    while sum(update.finish_reason is not None for update in updates) < 2:
        updates += (await gateway.read()).updates
    by_id = {update.request_id: update for update in updates if update.finish_reason is not None}
    assert by_id["old"].finish_reason is FinishReason.LENGTH
    assert by_id["new"].error is not None
    assert by_id["new"].error.code == "worker_draining"
    assert (await gateway.stub.Stats(worker_pb2.StatsRequest())).load.draining
    await gateway.close()


async def test_a_worker_that_is_told_to_leave_ends_after_its_last_word() -> None:
    worker = Worker(parts_of(Slow(ToyRunner(WEIGHT, BLOCK, VOCAB))))  # it still writes when it is told
    await worker.start("127.0.0.1")
    gateway = Gateway(worker.info.address, "g")
    gateway.submit("old", tuple(range(8)), ENDLESS)
    while not (await gateway.read()).updates:
        pass
    left = await gateway.stub.Drain(worker_pb2.DrainRequest(exit=True))
    assert left.num_running == 1
    async with asyncio.timeout(60):
        await worker.wait()
        stopping = asyncio.create_task(worker.stop())
        told = [update for message in gateway.messages for update in message.updates]
        while not told or told[-1].finish_reason is None:
            told += (await gateway.read()).updates
        await stopping
    assert len(tokens(told)) == ENDLESS.max_tokens
    await gateway.close()


async def test_a_stream_must_begin_with_hello(worker: Worker) -> None:
    channel = grpc.aio.insecure_channel(worker.info.address)
    stub: Any = worker_pb2_grpc.WorkerStub(channel)

    async def sending() -> AsyncIterator[Any]:
        yield worker_pb2.ToWorker(abort=worker_pb2.AbortRequest(request_ids=["x"]))

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Stream(sending()).read()
    assert type(error_of(failed.value)) is InvalidRequest
    await channel.close(None)


async def test_only_a_worker_that_receives_kv_can_be_reserved_on(worker: Worker) -> None:
    gateway = Gateway(worker.info.address, "g")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await gateway.stub.Reserve(worker_pb2.ReserveRequest(request_id="r", prompt_ids=[1]))
    error = error_of(failed.value)
    assert type(error) is InvalidRequest
    assert "colocated" in error.message
    await gateway.close()


def ticket_for(parts: WorkerParts) -> Callable[[ReserveRequest, float], Ticket]:
    """Reserves any request."""

    def reserve(asked: ReserveRequest, now: float) -> Ticket:
        return Ticket(
            ticket_id=asked.request_id,
            generation=asked.generation,
            lease_s=asked.lease_s,
            block_ids=(1,),
            num_cached_tokens=0,
            layout=parts.info.layout,
            destination=parts.info.lane,
        )

    return reserve


def asking(parts: WorkerParts, gateway_id: str) -> ReserveRequest:
    lane, layout = parts.info.lane, parts.info.layout
    return ReserveRequest(request_id="r", prompt_ids=(1,), source=lane, source_layout=layout, gateway_id=gateway_id)


async def test_a_reservation_goes_with_the_stream_of_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB))
    aborted: list[str] = []
    withdrawn = threading.Event()

    def abort(request_ids: tuple[str, ...]) -> int:
        aborted.extend(request_ids)
        withdrawn.set()
        return 0

    monkeypatch.setattr(parts.engine, "abort", abort)
    worker = Worker(replace(parts, reserve=ticket_for(parts)))
    await worker.start("127.0.0.1")
    gateway = Gateway(worker.info.address, "g")
    await gateway.read()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await gateway.stub.Reserve(to_proto(asking(parts, "somebody else")))
    assert type(error_of(failed.value)) is Unavailable
    await gateway.stub.Reserve(to_proto(asking(parts, "g")))
    await gateway.close()
    assert await asyncio.to_thread(withdrawn.wait, 30)
    assert aborted == ["r"]
    await worker.stop()


async def test_requests_of_a_new_stream_outlive_the_old_one() -> None:
    parts = parts_of(Slow(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    worker = Worker(replace(parts, reserve=ticket_for(parts)))
    await worker.start("127.0.0.1")
    broken = Gateway(worker.info.address, "g")
    await broken.read()
    await broken.stub.Reserve(to_proto(asking(parts, "g")))
    again = Gateway(worker.info.address, "g")
    again.submit("r", tuple(range(8)), ENDLESS)
    while not (await again.read()).updates:
        pass
    await broken.close()
    assert (await again.until_finished("r"))[-1].finish_reason is FinishReason.LENGTH
    await again.close()
    await worker.stop()


async def test_a_stream_that_ends_before_use_is_dropped() -> None:
    gate = Gate(ToyRunner(WEIGHT, BLOCK, VOCAB))
    gate.open.clear()
    parts = parts_of(gate)
    worker = Worker(replace(parts, reserve=ticket_for(parts)))
    await worker.start("127.0.0.1")
    staying = Gateway(worker.info.address, "staying")
    staying.submit("r", tuple(range(8)))
    assert await asyncio.to_thread(gate.entered.wait, 30)
    hasty = Gateway(worker.info.address, "hasty")
    assert worker._loop is not None
    while not worker._loop._inbox:  # its hello waits for the step to end
        await staying.stub.Describe(worker_pb2.DescribeRequest())
    await hasty.close()
    await staying.stub.Describe(worker_pb2.DescribeRequest())
    gate.open.set()
    await staying.until_finished("r")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await staying.stub.Reserve(to_proto(asking(parts, "hasty")))
    assert type(error_of(failed.value)) is Unavailable
    await staying.close()
    await worker.stop()


async def test_a_late_kv_failure_reaches_its_gateway() -> None:
    worker = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB), HandsOver()))
    await worker.start("127.0.0.1")
    gateway = Gateway(worker.info.address, "g")
    gateway.submit("r", tuple(range(8)))
    assert (await gateway.until_finished("r"))[-1].finish_reason is FinishReason.PREFILLED
    failed = (await gateway.until_finished("r"))[-1]
    assert failed.error is not None
    assert failed.error.code == TransferFailed.code
    await gateway.close()
    await worker.stop()


async def test_a_broken_engine_ends_the_worker_and_its_health() -> None:
    served = Worker(parts_of(Breaks()))
    await served.start("127.0.0.1")
    gateway = Gateway(served.info.address, "g")
    gateway.submit("r", (1, 2, 3))
    with pytest.raises(WorkerLost, match="on fire"):
        await served.wait()
    health = from_proto(Health, await gateway.stub.Health(worker_pb2.HealthRequest()))
    assert not health.healthy
    assert "on fire" in health.reason
    await gateway.close()
    await served.stop()


async def test_a_step_that_hangs_is_not_healthy() -> None:
    gate = Gate(ToyRunner(WEIGHT, BLOCK, VOCAB))
    gate.open.clear()
    now = [0.0]
    served = Worker(parts_of(gate), clock=lambda: now[0], stall_s=5.0)
    await served.start("127.0.0.1")
    gateway = Gateway(served.info.address, "g")
    gateway.submit("r", (1, 2, 3))
    assert await asyncio.to_thread(gate.entered.wait, 30)
    assert (await gateway.stub.Health(worker_pb2.HealthRequest())).healthy
    now[0] = 6.0
    health = from_proto(Health, await gateway.stub.Health(worker_pb2.HealthRequest()))
    assert not health.healthy
    assert "6 s" in health.reason
    gate.open.set()
    await gateway.until_finished("r")
    await gateway.close()
    await served.stop()


async def test_a_worker_with_a_hung_lane_is_unhealthy() -> None:
    lane = LaneStats(peer="d0#1", transport="nccl", state="open", num_bytes=0, busy_s=0.0, idle_s=0.0)
    lanes = [lane]
    served = Worker(replace(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)), lanes=lambda: lanes))
    await served.start("127.0.0.1")
    gateway = Gateway(served.info.address, "g")
    for state, healthy in (("open", True), ("quarantined", True), ("stuck", False)):
        lanes[0] = replace(lane, state=state)
        health = from_proto(Health, await gateway.stub.Health(worker_pb2.HealthRequest()))
        assert health.healthy is healthy
    assert health.reason == "the lane to d0#1 is stuck and does not end"
    await gateway.close()
    await served.stop()


async def test_a_gateway_that_does_not_read_is_disconnected() -> None:
    parts = parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB))
    servicer = WorkerServicer(
        info=parts.info, engine=parts.engine, clock=time.monotonic, stats=lambda: pytest.fail("nobody asked")
    )
    loop = ThreadedEngineLoop(parts.engine, clock=time.monotonic, publish=servicer.publish, on_fault=lambda error: None)
    servicer.attach(loop)
    loop.start()
    messages: asyncio.Queue[Any] = asyncio.Queue()
    messages.put_nowait(worker_pb2.ToWorker(hello=to_proto(Hello(gateway_id="asleep"))))
    request = GenerateRequest(request_id="r", prompt_ids=(1, 2, 3), sampling=ENDLESS)
    messages.put_nowait(worker_pb2.ToWorker(submit=to_proto(request)))

    async def sending() -> AsyncIterator[Any]:
        while True:
            yield await messages.get()

    stream = servicer.Stream(sending(), None)
    assert (await anext(stream)).events[0].snapshot
    (asleep,) = servicer._streams
    for _ in range(MAX_BACKLOG_MESSAGES + 1):
        servicer.publish(StepMessage(load=WorkerLoad()))
    assert asleep.queue.qsize() == 1, "its backlog is dropped"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert await loop.call(lambda: parts.engine.load().num_running) == 0
    await loop.stop()
    parts.engine.assert_idle()


async def test_a_refused_reservation_keeps_the_running_request() -> None:
    """A renewal may come when the request has been adopted already."""

    def refuse(asked: ReserveRequest, now: float) -> Ticket:
        raise TransferFailed("adopted already")

    served = Worker(replace(parts_of(Slow(ToyRunner(WEIGHT, BLOCK, VOCAB))), reserve=refuse))
    await served.start("127.0.0.1")
    gateway = Gateway(served.info.address, "g")
    await gateway.read()
    gateway.submit("r", (1, 2, 3))
    while not (await gateway.read()).updates:
        pass
    layout, lane = served.info.layout, served.info.lane
    asked = ReserveRequest(request_id="r", prompt_ids=(1, 2, 3), source=lane, source_layout=layout, gateway_id="g")
    with pytest.raises(grpc.aio.AioRpcError):
        await gateway.stub.Reserve(to_proto(asked))
    updates = [update for message in gateway.messages for update in message.updates]
    while updates[-1].finish_reason is None:
        updates += (await gateway.read()).updates
    assert tokens(updates) == toy_tokens((1, 2, 3), 12, weight=WEIGHT, vocab_size=VOCAB)
    await gateway.close()
    await served.stop()
