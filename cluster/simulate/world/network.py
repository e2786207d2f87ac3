"""gRPC between gateways and workers without sockets: the same stubs and the same servicer; timers carry the messages.

    WorkerStub ─▶ Channel ── Pipe: delay, order kept, held while the wire is cut ──▶ Port ─▶ WorkerServicer
                     ▲                                                               │
                     └────────────────────────── Pipe ◀───────────────────────────────┘

Many or large messages are the values themselves (`VALUES`), which are never mutated. Errors of a broken connection, and
the time until both sides notice, are gRPC's with Baton's keepalive (`router.fleet.worker_client.CHANNEL_OPTIONS`).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from msgspec.structs import replace

from protos.values import GenerateRequest
from protos.wire import ChannelEncoding

KEEPALIVE_S = 2.5
"""Both sides give a connection up after this long without a sign of life."""
RESET_S = 0.001
"""Until peers learn of a process's end from its kernel."""
RETRANSMIT_S = 0.2
"""The least retransmission timeout of Linux's TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """A message takes `delay_s`, and up to `jitter_s` more; the share `loss` is sent twice."""

    delay_s: float = 0.0002
    jitter_s: float = 0.0
    loss: float = 0.0


class Submitted:
    """`ToWorker` with a request, as far as `WorkerServicer` and `WorkerClient` use it."""

    __slots__ = ("submit",)
    further = ()

    def __init__(self, request: GenerateRequest, number: int) -> None:
        self.submit = replace(request, number=number)

    def WhichOneof(self, group: str) -> str:
        return "submit"

    def ByteSize(self) -> int:
        return 4 * (len(self.submit.prompt_ids) + len(self.submit.output_ids))


def _itself(value: Any) -> Any:
    return value


VALUES = ChannelEncoding(value=_itself, submit=Submitted)


class Network:
    """`rng` draws jitter and loss."""

    def __init__(self, wire: NetworkModel, rng: random.Random) -> None:
        self.wire = wire
        self._rng = rng
        self._ports: dict[str, Port] = {}

    def listen(self, address: str, servicer: Any) -> Port:
        port = self._ports[address] = Port(address, servicer)
        return port

    def open_channel(self, address: str) -> SimulatedChannel:
        return SimulatedChannel(self, address)

    def port(self, address: str) -> Port | None:
        port = self._ports.get(address)
        return port if port is not None and not port.closed else None

    def travel_s(self) -> float:
        wire = self.wire
        delay_s = wire.delay_s
        if wire.jitter_s:
            delay_s += self._rng.random() * wire.jitter_s
        if wire.loss and self._rng.random() < wire.loss:
            delay_s += RETRANSMIT_S
        return delay_s


class Pipe:
    """One direction of a connection: messages arrive in order, or not at all."""

    def __init__(self, network: Network, port: Port, arrived: asyncio.Queue[Any] | None = None) -> None:
        self._network = network
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[Any] = deque()
        self._due_s = 0.0
        self.arrived: asyncio.Queue[Any] = arrived if arrived is not None else asyncio.Queue()

    def send(self, message: Any) -> None:
        self._due_s = max(self._due_s, self._loop.time() + self._network.travel_s())
        self._under_way.append(message)
        self._loop.call_at(self._due_s, self._arrive)

    def _arrive(self) -> None:
        if self._port.frozen:
            self._port.when_thawed(self._arrive)
        elif self._under_way:
            self.arrived.put_nowait(self._under_way.popleft())

    def __aiter__(self) -> Pipe:
        return self

    async def __anext__(self) -> Any:
        message = await self.arrived.get()
        if message is None:
            raise StopAsyncIteration
        return message


class Port:
    """The address of a process. A frozen one neither receives nor sends."""

    def __init__(self, address: str, servicer: Any) -> None:
        self.address = address
        self.servicer = servicer
        self.closed = False
        self.frozen = False
        self.change: Callable[[Any], Any] | None = None  # faults of messages on its streams
        self.calls: dict[Call, None] = {}
        self._waiting: list[Callable[[], object]] = []

    def freeze(self) -> None:
        """Peers give up after `KEEPALIVE_S`; the process notices this when it thaws."""
        self.frozen = True
        asyncio.get_running_loop().call_later(KEEPALIVE_S, self._given_up, tuple(self.calls))

    def thaw(self) -> None:
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def when_thawed(self, callback: Callable[[], object]) -> None:
        self._waiting.append(callback)

    async def awake(self) -> None:
        while self.frozen:
            thawed = asyncio.Event()
            self.when_thawed(thawed.set)
            await thawed.wait()

    def close(self) -> None:
        self.closed = True
        for call in tuple(self.calls):
            call.stop()
            call.fail_later(RESET_S, "Connection reset by peer")

    def reset(self) -> None:
        for call in tuple(self.calls):
            call.fail_later(RESET_S, "Connection reset by peer")
            call.stop()

    def _given_up(self, calls: tuple[Call, ...]) -> None:
        if self.frozen and not self.closed:
            for call in calls:
                if call in self.calls:
                    call.fail_later(0.0, "keepalive watchdog timeout")
                    self.when_thawed(call.stop)


class Call:
    """One running RPC: the server's task and the client's future."""

    def __init__(self, port: Port | None, fail: Callable[[grpc.RpcError], None]) -> None:
        self._port = port
        self._fail = fail
        self._task: asyncio.Task[None] | None = None

    def serve(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._port is not None
        self._port.calls[self] = None
        self._task = asyncio.create_task(work, name=name)
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def fail_later(self, delay_s: float, why: str) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._fail, rpc_error(grpc.StatusCode.UNAVAILABLE, why))

    def _ended(self, task: asyncio.Task[None]) -> None:
        assert self._port is not None
        self._port.calls.pop(self, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class SimulatedChannel:
    """`grpc.aio.Channel`, as far as it is used."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._waiting: dict[asyncio.Future[Any], None] = {}

    def unary_unary(self, path: str, **codec: Any) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = path.rpartition("/")[2]

        async def call(request: Any, *, timeout: float) -> Any:  # noqa: ASYNC109 - as gRPC calls it
            try:
                async with asyncio.timeout(timeout):
                    return await self._ask(method, request)
            except TimeoutError:
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return call

    def stream_stream(self, path: str, **codec: Any) -> Callable[[AsyncIterator[Any]], SimulatedStream]:
        method = path.rpartition("/")[2]
        return lambda outgoing: SimulatedStream(self._network, self._address, method, outgoing)

    async def close(self, grace: float | None) -> None:
        """Cancels calls that wait for an answer, as gRPC does."""
        for reply in tuple(self._waiting):
            reply.cancel()

    async def _ask(self, method: str, request: Any) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = None
        call: Call | None = None
        try:
            await asyncio.sleep(self._network.travel_s())
            port = self._network.port(self._address)
            if port is None:
                raise rpc_error(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self._address}")
            call = Call(port, lambda error: None if reply.done() else reply.set_exception(error))
            self._begin(call, port, method, request, reply)
            return await reply
        finally:
            del self._waiting[reply]
            if call is not None and reply.cancelled():
                call.stop()

    def _begin(self, call: Call, port: Port, method: str, request: Any, reply: asyncio.Future[Any]) -> None:
        async def serve() -> None:
            await port.awake()
            try:
                answer: Any = await getattr(port.servicer, method)(request, Context())
            except Aborted as aborted:
                answer = aborted.error
            await port.awake()
            await asyncio.sleep(self._network.travel_s())
            if reply.done():
                return
            if isinstance(answer, grpc.RpcError):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)

        call.serve(serve(), f"{method} at {self._address}")


class SimulatedStream:
    """The client's side of a bidirectional call."""

    def __init__(self, network: Network, address: str, method: str, outgoing: AsyncIterator[Any]) -> None:
        self._network = network
        self._address = address
        self._method = method
        self._outgoing = outgoing
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self._call: Call | None = None
        self._task = asyncio.create_task(self._connect(), name=f"{method} to {address}")

    def cancel(self) -> bool:
        self._end()
        self._came.put_nowait(asyncio.CancelledError())
        return True

    def __aiter__(self) -> SimulatedStream:
        return self

    async def __anext__(self) -> Any:
        message = await self._came.get()
        if message is None:
            self._end()
            raise StopAsyncIteration
        if isinstance(message, BaseException):
            self._end()
            raise message
        return message

    def _end(self) -> None:
        self._task.cancel()
        if self._call is not None:
            call, self._call = self._call, None
            asyncio.get_running_loop().call_later(self._network.travel_s(), call.stop)

    async def _connect(self) -> None:
        await asyncio.sleep(self._network.travel_s())
        port = self._network.port(self._address)
        if port is None:
            error = rpc_error(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self._address}")
            self._came.put_nowait(error)
            return
        there, back = Pipe(self._network, port), Pipe(self._network, port, self._came)
        self._call = Call(port, self._came.put_nowait)
        self._call.serve(self._serve(port, there, back), f"{self._method} at {self._address}")
        async for message in self._outgoing:
            there.send(message)
        there.send(None)

    async def _serve(self, port: Port, there: Pipe, back: Pipe) -> None:
        try:
            async for message in getattr(port.servicer, self._method)(aiter(there), Context()):
                back.send(port.change(message) if port.change is not None else message)
        except Aborted as aborted:
            back.send(aborted.error)
        else:
            back.send(None)


class Context:
    """`grpc.aio.ServicerContext`, as far as `protos.grpc_status.abort_with` uses it."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> NoReturn:
        raise Aborted(rpc_error(code, details, trailing_metadata))


class Aborted(Exception):
    def __init__(self, error: grpc.RpcError) -> None:
        super().__init__()
        self.error = error


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None)
