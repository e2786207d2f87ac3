"""One connection to one worker: a multiplexed token stream for all requests, and control calls.

    submit(a) ─┐                                        ┌─▶ Updates of a
    submit(b) ─┼─▶ outbox ══ Stream ══▶ worker ══▶ run ─┼─▶ Updates of b
    abort(c)  ─┘            (Hello first)               └─▶ receive(step): events and load, for the fleet

Everything lives on one event loop; `submit`, `abort` and `lose` return at once. A lost connection stays lost: every
open request fails, and the fleet makes a new client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain, count
from typing import Any, NoReturn, TypeVar

import grpc
from msgspec.structs import replace

from protos import worker_pb2, worker_pb2_grpc
from protos.errors import BatonError, DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable, WorkerLost
from protos.grpc_status import error_of, in_words, peer_error
from protos.tls import why_refused
from protos.values import (
    Adapter,
    FinishReason,
    GenerateRequest,
    Health,
    Hello,
    MoveRequest,
    Profile,
    ReserveRequest,
    SequenceUpdate,
    ShareRequest,
    StepMessage,
    Ticket,
    WorkerInfo,
    WorkerRole,
    WorkerStats,
)
from protos.wire import PROTOBUF, ChannelEncoding, from_proto, raised, to_proto
from router.fleet.channels import OpenChannel, open_channel
from router.streaming.token_sink import SinkTable, TokenSink

Value = TypeVar("Value")

log = logging.getLogger("baton.router")

MAX_TOGETHER_BYTES = 2**20
ADAPTER_TIMEOUT_S = 120.0
"""Seconds to load an adapter, whose files may come from a slow disk."""


class Updates:
    """One worker's updates of one request, in order. Raises the error that the worker, or its loss, ended it with.

    A consumer slower than the worker gets several updates joined to one, and catches up. While the consumer waits, it
    has processed all earlier updates: then an attached sink receives plain tokens.
    """

    def __init__(self, request_id: str = "", number: int = 0, table: SinkTable | None = None) -> None:
        self.request_id = request_id
        self.number = number
        self._sink: TokenSink | None = None
        self._table = table
        self._waiting: deque[SequenceUpdate | BatonError] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Future[None] | None = None
        self._is_cancelled = False
        self._over = False
        self._heir: Updates | None = None

    def attach(self, sink: TokenSink | None) -> None:
        """Attaches a sink. The consumer calls this between two updates; the sink is open while the consumer waits for
        the next update."""
        if self._sink is not None and sink is None:
            self._sink.close()
        self._sink = sink

    def put(self, update: SequenceUpdate) -> None:
        if update.finish_reason is not FinishReason.ERROR:
            self._add(update)
        elif update.error is None:
            self.fail(WorkerLost(f"request {update.request_id} failed without a reason"))
        else:
            self.fail(raised(update.error))

    def fail(self, error: BatonError) -> None:
        if self._heir is not None:
            self._heir.fail(error)
        else:
            self._add(error)

    def forward_failures_to(self, heir: Updates) -> None:
        """Passes later failures, and a failure that is still queued, to `heir`: its work still needs this worker."""
        self._heir = heir
        for item in self._waiting:
            if isinstance(item, BatonError):
                heir.fail(item)
        self._waiting.clear()

    def report(self) -> bool:
        if self._sink is None or self._loop is None or not (token_ids := self._sink.report(self._loop.time())):
            return False
        self._put(SequenceUpdate(request_id=self.request_id, token_ids=token_ids))
        return True

    def __aiter__(self) -> Updates:
        return self

    async def __anext__(self) -> SequenceUpdate:
        if self._over:
            raise StopAsyncIteration
        waiting = self._waiting
        while not waiting:
            if self._is_cancelled:
                raise asyncio.CancelledError
            # Finding the running loop is a system call in Python 3.11, and every token takes this path.
            self._loop = self._loop or asyncio.get_running_loop()
            self._reader = self._loop.create_future()
            if self._sink is not None and self._table is not None:
                self._sink.open(self._table, self.number, self._loop.time())
            try:
                await self._reader
            except asyncio.CancelledError:
                if not self.report():
                    raise
                self._is_cancelled = True  # raised once the sink's tokens are counted
        item = waiting.popleft()
        if isinstance(item, BatonError):
            self._over = True
            raise item
        if waiting:
            item = self._joined(item)
        self._over = item.finish_reason is not None
        return item

    def _add(self, item: SequenceUpdate | BatonError) -> None:
        self.report()
        self._put(item)

    def _put(self, item: SequenceUpdate | BatonError) -> None:
        self._waiting.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _joined(self, first: SequenceUpdate) -> SequenceUpdate:
        waiting, parts = self._waiting, [first]
        while waiting and parts[-1].finish_reason is None and parts[-1].error is None:
            following = waiting[0]
            if isinstance(following, BatonError) or following.error is not None:
                break
            parts.append(following)
            waiting.popleft()
        if len(parts) == 1:
            return first
        return replace(
            first,
            token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
            finish_reason=parts[-1].finish_reason,
            num_cached_tokens=max(part.num_cached_tokens for part in parts),
            num_prompt_computed=max(part.num_prompt_computed for part in parts),
            embedding=parts[-1].embedding,
            num_predicted=sum(part.num_predicted for part in parts),
            num_mispredicted=sum(part.num_mispredicted for part in parts),
            num_drafted=sum(part.num_drafted for part in parts),
            num_accepted=sum(part.num_accepted for part in parts),
        )


class WorkerClient:
    """The client of the worker at `address` (host:port). Control calls raise the worker's typed error, or WorkerLost.
    `encoding` encodes messages that are many or large. `on_loss` is called when the connection is lost or closed."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        control_timeout_s: float,
        open_channel: OpenChannel = open_channel,
        encoding: ChannelEncoding = PROTOBUF,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._encoding = encoding
        self._on_loss = on_loss
        self._connect_timeout_s = connect_timeout_s
        self._control_timeout_s = control_timeout_s
        self._channel = open_channel(address)
        self._stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        self._outbox: asyncio.Queue[worker_pb2.ToWorker | None] = asyncio.Queue()
        self._open: dict[str, Updates] = {}
        self._numbered: dict[int, Updates] = {}  # by number
        self._numbers = count(1)
        self._sinks = SinkTable()
        self._is_draining = False
        self._late: set[asyncio.Task[Ticket]] = set()
        self._reads_further = False
        self._stream: Any = None
        self._lost: WorkerLost | None = None

    async def describe(self) -> WorkerInfo:
        reply = await self._call(self._stub.Describe, worker_pb2.DescribeRequest(), self._connect_timeout_s)
        info = from_proto(WorkerInfo, reply)
        self._reads_further = info.reads_further
        return info

    async def run(self, hello: Hello, receive: Callable[[StepMessage], None]) -> NoReturn:
        """Holds the token stream until it is lost, then raises WorkerLost. `receive` gets each message after its
        updates were delivered. No request may be submitted earlier: Hello comes first."""
        self.send_hello(hello)
        clock = asyncio.get_running_loop().time
        self._stream = self._stub.Stream(self._outgoing())
        error: BatonError = WorkerLost(f"the worker at {self.address} ended its stream")
        try:
            async for message in self._stream:
                step = from_proto(StepMessage, message)
                self._hand_out(step, clock())
                receive(step)
        except grpc.RpcError as failed:
            error = self._typed(failed)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost is None or (task is not None and task.cancelling()):  # else `lose` only cancelled the call
                error = WorkerLost(f"the connection to the worker at {self.address} was closed")
                raise
        finally:
            self.lose(WorkerLost(error.message))
        assert self._lost is not None
        raise self._lost

    @property
    def lost(self) -> bool:
        return self._lost is not None

    # -- the token path ------------------------------------------------------------------------------------------------

    def send_hello(self, hello: Hello) -> None:
        self._outbox.put_nowait(worker_pb2.ToWorker(hello=to_proto(hello)))

    def submit(self, request: GenerateRequest) -> Updates:
        updates = Updates(request.request_id, next(self._numbers), self._sinks)
        if self._lost is not None:
            updates.fail(WorkerLost(self._lost.message))
            return updates
        self._open[request.request_id] = self._numbered[updates.number] = updates
        self._outbox.put_nowait(self._encoding.submit(request, updates.number))
        return updates

    def release(self, request_id: str) -> None:
        if (updates := self._open.pop(request_id, None)) is not None:
            del self._numbered[updates.number]
            updates.attach(None)

    def abort(self, request_id: str) -> None:
        self.release(request_id)
        if self._lost is None:
            self._outbox.put_nowait(worker_pb2.ToWorker(abort=worker_pb2.AbortRequest(request_ids=[request_id])))

    def move(self, request: MoveRequest) -> None:
        if self._lost is None:
            self._outbox.put_nowait(worker_pb2.ToWorker(move=to_proto(request)))

    def set_unread(self, request_id: str, is_unread: bool) -> None:
        if self._lost is None:
            unread = worker_pb2.UnreadRequest(request_id=request_id, is_unread=is_unread)
            self._outbox.put_nowait(worker_pb2.ToWorker(unread=unread))

    def lose(self, error: WorkerLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._on_loss()
        for updates in self._open.values():
            updates.fail(WorkerLost(error.message))
        self._open.clear()
        self._numbered.clear()
        self._outbox.put_nowait(None)
        if self._stream is not None:
            self._stream.cancel()

    # -- control -------------------------------------------------------------------------------------------------------

    async def reserve(self, request: ReserveRequest) -> Ticket:
        """If it is cancelled, the blocks are released as soon as the worker has answered."""
        call = asyncio.create_task(
            self._call(self._stub.Reserve, self._encoding.value(request), self._control_timeout_s)
        )
        try:
            return from_proto(Ticket, await asyncio.shield(call))
        except asyncio.CancelledError:
            self._late.add(call)
            call.add_done_callback(lambda late: self._give_back(request.request_id, late))
            raise

    async def renew(self, request: ReserveRequest) -> None:
        """Repeats the call of `reserve`, which renews the lease. Cancelling it leaves the reservation unchanged."""
        await self._call(self._stub.Reserve, self._encoding.value(request), self._control_timeout_s)

    async def share(self, request: ShareRequest) -> int:
        reply = await self._call(self._stub.Share, to_proto(request), self._control_timeout_s)
        return int(reply.num_blocks)

    async def drain(self, *, exit: bool = False) -> int:
        reply = await self._call(self._stub.Drain, worker_pb2.DrainRequest(exit=exit), self._control_timeout_s)
        return int(reply.num_running)

    async def retire(self) -> int:
        reply = await self._call(self._stub.Drain, worker_pb2.DrainRequest(retire=True), self._control_timeout_s)
        return int(reply.num_running)

    async def change_role(self, role: WorkerRole) -> WorkerRole:
        request = worker_pb2.ChangeRoleRequest(role=role)
        return WorkerRole((await self._call(self._stub.ChangeRole, request, self._control_timeout_s)).role)

    async def load_adapter(self, name: str, path: str) -> Adapter:
        request = worker_pb2.LoadAdapterRequest(name=name, path=path)
        return from_proto(Adapter, await self._call(self._stub.LoadAdapter, request, ADAPTER_TIMEOUT_S))

    async def unload_adapter(self, name: str) -> None:
        request = worker_pb2.UnloadAdapterRequest(name=name)
        await self._call(self._stub.UnloadAdapter, request, self._control_timeout_s)

    async def stats(self) -> WorkerStats:
        reply = await self._call(self._stub.Stats, worker_pb2.StatsRequest(), self._control_timeout_s)
        return from_proto(WorkerStats, reply)

    async def profile(self, recording: bool | None = None) -> Profile:
        request = worker_pb2.ProfileRequest(recording=recording)
        return from_proto(Profile, await self._call(self._stub.Profile, request, self._control_timeout_s))

    async def health(self, *, from_supervisor: bool = False) -> Health:
        request = worker_pb2.HealthRequest(from_supervisor=from_supervisor)
        reply = await self._call(self._stub.Health, request, self._control_timeout_s)
        return from_proto(Health, reply)

    async def close(self) -> None:
        self.lose(WorkerLost(f"the connection to the worker at {self.address} was closed"))
        await self._channel.close(None)

    # ------------------------------------------------------------------------------------------------------------------

    def _give_back(self, request_id: str, late: asyncio.Task[Ticket]) -> None:
        self._late.discard(late)
        if late.cancelled() or late.exception() is not None:
            return
        self.abort(request_id)

    async def _outgoing(self) -> AsyncIterator[worker_pb2.ToWorker]:
        """Messages to the worker. Requests made during one message leave together in the next: each message has a fixed
        cost."""
        outbox = self._outbox
        while (message := await outbox.get()) is not None:
            num_bytes = message.ByteSize() if outbox.qsize() else 0
            while self._reads_further and outbox.qsize() and num_bytes < MAX_TOGETHER_BYTES:
                if (further := outbox.get_nowait()) is None:
                    outbox.put_nowait(None)  # the end, after this message
                    break
                num_bytes += further.ByteSize()
                message.further.append(further)
            yield message

    def _hand_out(self, step: StepMessage, now: float) -> None:
        numbered, numbers, token_ids = self._numbered, step.numbers, step.token_ids
        if step.load is not None:
            self._is_draining = step.load.draining
        left: Sequence[int] = range(len(numbers))
        due: Sequence[int] = ()
        if not self._is_draining:  # while draining, sequences migrate, which begins between two updates
            left, due = self._sinks.deliver(numbers, token_ids, now)
        for place in left:
            if (updates := numbered.get(numbers[place])) is not None:  # otherwise the request was aborted
                updates.put(SequenceUpdate(request_id=updates.request_id, token_ids=(token_ids[place],)))
        for place in due:
            if (updates := numbered.get(numbers[place])) is not None:
                updates.report()
        for update in step.updates:
            if (updates := self._open.get(update.request_id)) is None:
                continue
            updates.put(update)
            if update.finish_reason is not None and update.finish_reason.is_last:
                self.release(update.request_id)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        if self._lost is not None:
            raise WorkerLost(self._lost.message)
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as failed:
            raise self._typed(failed) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost is None or (task is not None and task.cancelling()):
                raise
            raise WorkerLost(self._lost.message) from None  # closing a channel cancels its calls and not their callers

    def _typed(self, failed: grpc.RpcError) -> BatonError:
        """The worker's own error, or its loss: only the end of a worker cancels calls, and only a crash cuts them
        off."""
        if (typed := peer_error(failed)) is not None:
            if isinstance(typed, Unauthenticated):  # the gateway's own credentials failed, not its client's
                return WorkerLost(f"the worker at {self.address} refuses this process: {typed.message}")
            return typed
        error = error_of(failed)
        if isinstance(error, InvalidRequest):
            return error
        if isinstance(error, DeadlineExceeded):
            return WorkerLost(f"the worker at {self.address} did not answer in time")
        log.debug("worker at %s: %s", self.address, error.message)
        message = in_words(error.message) if isinstance(error, Unavailable) else error.message
        why = why_refused(error.message) or message
        return WorkerLost(f"the worker at {self.address} cannot be reached: {why}")
