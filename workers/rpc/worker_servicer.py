"""The worker's gRPC service: one token stream per gateway, one message per engine step, and control calls.

A gateway's stream is also its lease: when it ends, all requests of that gateway are aborted.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from protos.errors import BatonError, InvalidRequest, Unauthenticated, Unavailable
from protos.grpc_status import abort_with
from protos.hints import counted
from protos.tls import TOKEN_KEY, token_metadata
from protos.values import (
    FinishReason,
    GenerateRequest,
    Hello,
    KVEvents,
    MoveRequest,
    Profile,
    ReserveRequest,
    SequenceUpdate,
    ShareRequest,
    StepMessage,
    Ticket,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
    WorkerStats,
)
from protos.wire import PROTOBUF, ChannelEncoding, error_info, from_proto, to_proto
from workers.engine.engine import Engine
from workers.rpc.adapter_calls import AdapterCalls
from workers.rpc.loop import EngineLoop

log = logging.getLogger("baton.worker")

Reserve = Callable[[ReserveRequest, float], Ticket]
Call = Callable[[Any, Any, Any], Awaitable[Any]]
MAX_BACKLOG_MESSAGES = 8192


class GatewayStream:
    """The queued messages to one gateway, and its requests, until the stream has `ended`."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.ended = False
        self.request_ids: dict[str, int] = {}  # oldest first, and their numbers
        self.updated: set[str] = set()  # requests with at least one update
        self.queue: asyncio.Queue[StepMessage | None] = asyncio.Queue()

    def message(
        self, updates: Sequence[SequenceUpdate], events: tuple[KVEvents, ...], load: WorkerLoad | None
    ) -> StepMessage:
        """The message to this gateway. A request whose only change is one more token is named by its number."""
        others, numbers, token_ids = list[SequenceUpdate](), list[int](), list[int]()
        for update in updates:
            request_id = update.request_id
            number = self.request_ids.get(request_id, 0)
            if number and request_id in self.updated and len(update.token_ids) == 1 and update.is_plain:
                numbers.append(number)
                token_ids += update.token_ids
            else:
                others.append(update)
                if number:
                    self.updated.add(request_id)
        return StepMessage(
            updates=tuple(others), events=events, load=load, numbers=tuple(numbers), token_ids=tuple(token_ids)
        )

    def send(self, message: StepMessage) -> bool:
        """Queues a message. False for a gateway that does not read: its whole backlog is dropped, so that it does not
        fill the memory."""
        if self.queue.qsize() < MAX_BACKLOG_MESSAGES:
            self.queue.put_nowait(message)
            return True
        log.warning(
            "gateway %s has not read %s: its stream is closed, and it must connect again",
            self.gateway_id,
            counted(self.queue.qsize(), "message"),
        )
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(None)
        return False


def _answered(call: Call) -> Call:
    """A call whose error is returned to the caller; `abort_with` logs unexpected ones."""

    @wraps(call)
    async def answer(servicer: Any, request: Any, context: Any) -> Any:
        try:
            return await call(servicer, request, context)
        except Exception as error:
            await abort_with(context, error)

    return answer


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """The gRPC service of a worker. `reserve` is None on workers that do not receive KV; `leave` ends the worker once
    it is drained; `change_role` begins to give it another role, or (None) ends such a change; `wall_clock` aligns
    profiles of several workers. Lives on the event loop, and reaches the engine only through `loop`."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        engine: Engine,
        clock: Callable[[], float],
        stats: Callable[[], WorkerStats],
        reserve: Reserve | None = None,
        leave: Callable[[], None] = lambda: None,
        change_role: Callable[[WorkerRole | None], None] = lambda role: None,
        supervised: Callable[[], None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
        encoding: ChannelEncoding = PROTOBUF,
    ) -> None:
        self._encoding = encoding
        self._info = info
        self._engine = engine
        self._clock = clock
        self._stats = stats
        self._reserve = reserve
        self._leave = leave
        self._change_role = change_role
        self._supervised = supervised
        self._wall_clock = wall_clock
        self._streams: dict[GatewayStream, None] = {}  # oldest first
        self._owners: dict[str, GatewayStream] = {}
        self._disowned = asyncio.Event()
        self._loop: EngineLoop | None = None
        self._adapters = AdapterCalls(engine)

    def attach(self, loop: EngineLoop) -> None:
        self._loop = loop
        if self._engine.adapters is not None:
            self._engine.adapters.listener = lambda served: loop.deliver(self._announce, StepMessage(adapters=served))

    @property
    def loop(self) -> EngineLoop:
        assert self._loop is not None, "attach() comes before the first call"
        return self._loop

    def publish(self, message: StepMessage) -> None:
        """Splits one step's message into one for each gateway: its own updates, with all events and the load."""
        updates: dict[GatewayStream, list[SequenceUpdate]] = {}
        for update in message.updates:
            owner = self._owners.get(update.request_id)
            if owner is not None:
                updates.setdefault(owner, []).append(update)
        load = message.load
        idle = load is not None and load.num_running + load.num_waiting == 0  # the other gateways get no later message
        for stream in tuple(self._streams):
            own = updates.get(stream, ())
            if own or message.events or not message.updates or idle:
                self._send(stream, stream.message(own, message.events, message.load))
        for update in message.updates:
            # A request that is handed over stays with this stream: its gateway needs the outcome of the transfer, too.
            # The gateway aborts the request once the other worker has answered.
            if update.finish_reason is not None and update.finish_reason.is_last:
                self._disown(update.request_id)

    def _send(self, stream: GatewayStream, message: StepMessage) -> None:
        if not stream.send(message):
            self._end(stream)

    # -- the token path ------------------------------------------------------------------------------------------------

    async def Stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "hello":
            await abort_with(context, InvalidRequest("the first message of a stream must be `hello`", param="hello"))
        stream = GatewayStream(first.hello.gateway_id)
        self._admit(stream, from_proto(Hello, first.hello))
        reader = asyncio.create_task(self._read(messages, stream))
        try:
            while (message := await stream.queue.get()) is not None:
                with self._engine.timeline.span("encode", num_rows=len(message.updates)):
                    encoded = self._encoding.value(message)
                yield encoded
        finally:
            reader.cancel()
            self._end(stream)

    def _admit(self, stream: GatewayStream, hello: Hello) -> None:
        """Reads the events on the engine's thread, so that none is lost between the first and the later ones."""

        def admit(message: StepMessage) -> None:
            if stream.ended:  # during the step before this
                return
            self._streams[stream] = None
            self._send(stream, message)

        def take() -> None:
            events, load = self._engine.events_since(hello), self._engine.load()
            served = self._engine.adapters.served if self._engine.adapters is not None else None
            self.loop.deliver(admit, StepMessage(events=(events,), load=load, role=self._info.role, adapters=served))

        self.loop.post(take)

    async def _read(self, messages: AsyncIterator[Any], stream: GatewayStream) -> None:
        try:
            async for message in messages:
                for each in (message, *message.further):
                    self._dispatch(stream, each)
        except ValueError as error:  # an unknown enum value: a peer of another version
            log.error("gateway %s sent a message that this worker cannot read: %s", stream.gateway_id, error)
        finally:
            stream.queue.put_nowait(None)

    def _dispatch(self, stream: GatewayStream, message: Any) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(stream, from_proto(GenerateRequest, message.submit))
        elif kind == "abort":
            self._abort(tuple(message.abort.request_ids))
        elif kind == "move":
            move = from_proto(MoveRequest, message.move)
            self._post(lambda: self._engine.migrate(move, self._clock()), move.request_id)
        elif kind == "unread":
            request_id, is_unread = message.unread.request_id, message.unread.is_unread
            self.loop.post(lambda: self._engine.scheduler.set_unread(request_id, is_unread, self._clock()))
        elif kind == "hello":
            self._admit(stream, from_proto(Hello, message.hello))

    def _submit(self, stream: GatewayStream, request: GenerateRequest) -> None:
        self._own(stream, request.request_id, request.number)

        self._post(lambda: self._engine.submit(request, self._clock()), request.request_id, FinishReason.ERROR)

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._disown(request_id)

        def abort() -> None:
            self._engine.abort(request_ids)

        self.loop.post(abort)

    def _post(self, action: Callable[[], None], request_id: str, on_error: FinishReason | None = None) -> None:
        """Posts an action for a request; its error is returned to the gateway, and the engine is intact. Without
        `on_error` the request continues here."""

        def run() -> None:
            try:
                action()
            except Exception as error:
                if not isinstance(error, BatonError):
                    log.exception("an order for request %s failed", request_id)
                update = SequenceUpdate(request_id=request_id, finish_reason=on_error, error=error_info(error))
                self.loop.deliver(self.publish, StepMessage(updates=(update,)))

        self.loop.post(run)

    def _own(self, stream: GatewayStream, request_id: str, number: int = 0) -> None:
        self._disown(request_id)
        self._owners[request_id] = stream
        stream.request_ids[request_id] = number

    def _disown(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner.request_ids.pop(request_id, None)
            owner.updated.discard(request_id)
            self._disowned.set()

    def _end(self, stream: GatewayStream) -> None:
        stream.ended = True
        self._streams.pop(stream, None)
        orphans = tuple(stream.request_ids)
        if orphans:
            num_orphans = counted(len(orphans), "request")
            log.warning("gateway %s has disconnected: aborting its %s", stream.gateway_id, num_orphans)
            self._abort(orphans)

    # -- control -------------------------------------------------------------------------------------------------------

    async def Describe(self, request: Any, context: Any) -> Any:
        return to_proto(self._info)

    @_answered
    async def Reserve(self, request: Any, context: Any) -> Any:
        if (reserve := self._reserve) is None:
            raise InvalidRequest(
                f"worker {self._info.worker_id} is a {self._info.role} worker: reserve on a decode one"
            )
        reservation = from_proto(ReserveRequest, request)
        was_owned = reservation.request_id in self._owners
        self._own_reservation(reservation)
        try:
            return self._encoding.value(await self.loop.call(lambda: reserve(reservation, self._clock())))
        except Exception:
            if not was_owned:  # else a renewal came too late: the request is still owned
                self._disown(reservation.request_id)
            raise

    @_answered
    async def Share(self, request: Any, context: Any) -> Any:
        share_request = from_proto(ShareRequest, request)
        num_blocks = await self.loop.call(lambda: self._engine.share(share_request, self._clock()))
        return worker_pb2.ShareReply(num_blocks=num_blocks)

    def _own_reservation(self, reservation: ReserveRequest) -> None:
        """A reservation ends with its gateway's stream, as a request does. Raises Unavailable without such a stream."""
        if not reservation.gateway_id:
            return
        own = (stream for stream in reversed(self._streams) if stream.gateway_id == reservation.gateway_id)
        stream = next(own, None)
        if stream is None:
            raise Unavailable(f"gateway {reservation.gateway_id} has no stream here: send Hello before Reserve")
        self._own(stream, reservation.request_id)

    async def Abort(self, request: Any, context: Any) -> Any:
        ids = tuple(request.request_ids)
        for request_id in ids:
            self._disown(request_id)
        return worker_pb2.AbortReply(num_aborted=await self.loop.call(lambda: self._engine.abort(ids)))

    async def ChangeRole(self, request: Any, context: Any) -> Any:
        try:
            self._change_role(WorkerRole(request.role))
        except (BatonError, ValueError) as error:
            await abort_with(context, error if isinstance(error, BatonError) else InvalidRequest(str(error)))
        return worker_pb2.ChangeRoleReply(role=self._info.role)

    @_answered
    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        return to_proto(await self._adapters.load(self.loop, request.name, request.path))

    @_answered
    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        await self._adapters.unload(self.loop, request.name)
        return worker_pb2.UnloadAdapterReply()

    async def Drain(self, request: Any, context: Any) -> Any:
        if request.retire:
            return worker_pb2.DrainReply(num_running=await self.loop.call(lambda: self._stop(self._engine.retire)))
        self._change_role(None)  # otherwise it would take new work afterwards
        if request.exit:
            self._leave()  # first: the caller may not wait for a long step's end
        num_left = await self.loop.call(lambda: self._stop(self._engine.drain))
        return worker_pb2.DrainReply(num_running=num_left)

    def _stop(self, how: Callable[[], None]) -> int:
        """Drains or retires the engine. Returns the number of running requests, at least 1 while a transfer runs.
        Called on the engine's thread."""
        how()
        load = self.send_load()
        return max(load.num_running + load.num_waiting, int(self._engine.has_work()))

    def send_load(self, role: WorkerRole | None = None) -> WorkerLoad:
        """Sends the load to every gateway, with the worker's new role if it has one. Called on the engine's thread."""
        load = self._engine.load()
        self.loop.deliver(self._announce, StepMessage(load=load, role=role))
        return load

    @property
    def has_owners(self) -> bool:
        return bool(self._owners)

    async def disowned(self) -> None:
        """Returns when no gateway owns a request on this worker, including requests whose KV has already been sent."""
        while self._owners:
            self._disowned.clear()
            await self._disowned.wait()

    def unowned(self, request_ids: Iterable[str]) -> list[str]:
        return [request_id for request_id in request_ids if request_id not in self._owners]

    def end_streams(self) -> None:
        """Ends each gateway's stream after the messages that are still queued."""
        for stream in tuple(self._streams):
            stream.queue.put_nowait(None)

    def _announce(self, message: StepMessage) -> None:
        if message.role is not None:
            self._info = replace(self._info, role=message.role)
        if message.adapters is not None:
            self._info = replace(self._info, adapters=message.adapters.adapters)
        for stream in tuple(self._streams):
            self._send(stream, message)

    async def Stats(self, request: Any, context: Any) -> Any:
        return to_proto(await self.loop.call(self._stats))

    async def Profile(self, request: Any, context: Any) -> Any:
        """Answered also while a step hangs."""
        timeline = self._engine.timeline
        spans, num_dropped = timeline.record(request.recording if request.HasField("recording") else None)
        offset_s = self._wall_clock() - timeline.now()
        return to_proto(Profile(spans=spans, num_dropped=num_dropped, wall_offset_s=offset_s))

    async def Health(self, request: Any, context: Any) -> Any:
        if request.from_supervisor:
            self._supervised()
        return to_proto(self.loop.health(self._clock()))


def new_server(token: str = "") -> grpc.aio.Server:
    """A server with limits that fit long prompts and pings that find a dead gateway in seconds. With a `token` it
    accepts only calls that have it."""
    return grpc.aio.server(
        interceptors=[TokenCheck(token)] if token else [],
        options=[
            ("grpc.max_receive_message_length", 64 * 2**20),
            ("grpc.max_send_message_length", 64 * 2**20),
            ("grpc.keepalive_time_ms", 2000),
            ("grpc.keepalive_timeout_ms", 2000),
            ("grpc.http2.ping_timeout_ms", 2000),  # this alone decides when a keepalive ping is lost; default 60 s
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        ],
    )


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Rejects a call without the token with UNAUTHENTICATED, before any of its content is read."""

    def __init__(self, token: str) -> None:
        ((_, value),) = token_metadata(token)
        self._expected = value.encode()
        self._has_refused = False
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)  # fits every kind of method

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        shown = next((value for name, value in details.invocation_metadata or () if name == TOKEN_KEY), "")
        if hmac.compare_digest(shown.encode(), self._expected):
            return await continuation(details)
        return self._refusal

    async def _refuse(self, messages: Any, context: Any) -> None:
        level = logging.DEBUG if self._has_refused else logging.WARNING
        self._has_refused = True
        log.log(level, "refused a call from %s without this run's token", context.peer())
        await abort_with(
            context,
            Unauthenticated(
                "this worker answers only calls with its run's token, as `authorization: Bearer TOKEN` in their "
                "metadata: `baton gateway --token TOKEN`, or peers.token in its file"
            ),
        )
