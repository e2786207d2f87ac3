"""A worker without an engine that speaks the real protocol over real gRPC, and can be told to misbehave.

The token at index i of an output depends on the prompt and on i alone, so that any worker goes on where another ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from kvtransfer.hashing import chain_hashes
from protos import worker_pb2, worker_pb2_grpc
from protos.errors import BatonError, NotFound, TransferFailed, WorkerDraining, WorkerLost
from protos.grpc_status import abort_with
from protos.values import (
    Adapter,
    AdapterList,
    BlockStored,
    FinishReason,
    GenerateRequest,
    Health,
    Hello,
    KVEvent,
    KVEvents,
    KVLayout,
    LaneAddress,
    Logprobs,
    MoveRequest,
    ReserveRequest,
    SequenceUpdate,
    ShareRequest,
    StepMessage,
    Ticket,
    TokenLogprob,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
    WorkerStats,
)
from protos.wire import error_info, from_proto, to_proto

BLOCK_SIZE = 4
LAYOUT = KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE, dtype="float32")


def token_at(prompt_ids: tuple[int, ...], index: int) -> int:
    return (sum(prompt_ids) * 31 + index * 7) % 997


def expected_tokens(prompt_ids: tuple[int, ...], count: int) -> list[int]:
    return [token_at(prompt_ids, index) for index in range(count)]


class Sequence:
    """One submitted request: `ready` once its KV is there."""

    def __init__(self, request: GenerateRequest, gateway: asyncio.Queue[StepMessage], *, ready: bool) -> None:
        self.request = request
        self.gateway = gateway
        self.ready = ready
        self.num_made = 0


VECTOR = bytes(4 * 8)  # of float32
LANE_KEY = "of the rendezvous server of lanes"


class FakeWorker:
    """`peers` maps worker ids to workers, so that a fake prefill worker can push. What a test may set:

    `pause_after` tokens of every request, no step is made until `go()`; a prompt it is `stuck_on` gets no token;
    `refuse` ends Reserve with an error and `reserving` keeps it open; `loses_kv` makes pushes fail, and `clings`
    moves, which are told of with `says_when_moving` tokens; `skips` drops the next message with events; `cached` is
    what prompts find; `draining` and `healthy` are what they say.
    """

    def __init__(self, worker_id: str, role: WorkerRole, peers: dict[str, FakeWorker], /, **info: Any) -> None:
        self.worker_id = worker_id
        self.role = role
        self.peers = peers
        peers[worker_id] = self
        self.incarnation = 1
        self.address = ""
        self._info = info
        self.pause_after: int | None = None
        self.refuse: BatonError | None = None
        self.reserving: asyncio.Event | None = None
        self.stuck_on: tuple[int, ...] | None = None
        self.loses_kv = False
        self.clings = False
        self.says_when_moving = self.skips = self.cached = 0
        self.draining = False
        self.healthy = True
        self.load = WorkerLoad(num_blocks=100, num_free_blocks=100)
        self.submitted: list[GenerateRequest] = []
        self.reserved: list[ReserveRequest] = []
        self.aborted: list[str] = []
        self.moved: list[MoveRequest] = []
        self.unread: list[tuple[str, bool]] = []
        self.shared: list[ShareRequest] = []
        self.hellos: list[Hello] = []
        self.num_messages = 0
        self._fresh()

    def _fresh(self) -> None:
        """A new life: nothing runs, nothing is cached."""
        self.running: dict[str, Sequence] = {}
        self.tickets: dict[str, Ticket] = {}
        self.arrived: set[str] = set()
        self.blocks: dict[bytes, None] = {}
        self.adapters: dict[str, Adapter] = {}
        self.next_seq = 0
        self._events: list[KVEvent] = []
        self._gateways: dict[asyncio.Queue[StepMessage], Hello] = {}
        self._reservations: list[tuple[asyncio.Queue[StepMessage], str]] = []
        self.failed: dict[str, Any] = {}
        self._work = asyncio.Event()
        self._turn = asyncio.Event()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(Life(self), self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        self._engine = asyncio.create_task(self._steps())

    async def die(self) -> None:
        self.incarnation += 1
        self._engine.cancel()
        self._fresh()
        await self._server.stop(None)

    async def restart(self) -> None:
        """The same worker at the same address, in its next life."""
        await self.start(int(self.address.rpartition(":")[2]))

    def go(self, pause_after: int | None = None) -> None:
        self.pause_after = pause_after
        self._work.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once something that happened to this worker has made the condition true."""
        async with asyncio.timeout(60):
            while not condition():
                await self._turn.wait()

    def _happened(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while updates := [made for sequence in list(self.running.values()) if (made := self._make(sequence))]:
                self.say(updates)
                await asyncio.sleep(0)

    def _make(self, sequence: Sequence) -> tuple[Sequence, SequenceUpdate] | None:
        request = sequence.request
        if not sequence.ready or sequence.num_made == self.pause_after or request.prompt_ids == self.stuck_on:
            return None
        index = len(request.output_ids) + sequence.num_made
        token = self.token(request, index)
        first = sequence.num_made == 0
        sequence.num_made += 1
        reason = None
        if token in request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif index + 1 >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        elif self._hands_over(request):
            reason = FinishReason.PREFILLED
        if first:
            self._store(request)
        if reason is not None:
            del self.running[request.request_id]
        if reason is FinishReason.PREFILLED:
            assert request.ticket is not None
            self._push(request.ticket)
        asked = request.sampling.prompt_logprobs is not None and first
        return sequence, SequenceUpdate(
            request_id=request.request_id,
            token_ids=(token,),
            logprobs=(logprob(token),) if request.sampling.logprobs is not None else (),
            prompt_logprobs=tuple(logprob(token) for token in request.prompt_ids[1:]) if asked else (),
            finish_reason=reason,
            num_cached_tokens=self.cached if first else 0,
            num_prompt_computed=len(request.prompt_ids) if first and request.tells_progress else 0,
            embedding=VECTOR if request.sampling.pooling else b"",
        )

    def _hands_over(self, request: GenerateRequest) -> bool:
        """Only a prefill worker does, and only what another worker has reserved room for."""
        ticket = request.ticket
        return self.role is WorkerRole.PREFILL and ticket is not None and ticket.destination != self.info().lane

    def token(self, request: GenerateRequest, index: int) -> int:
        """The token of the output at `index`; tests override it."""
        return token_at(request.prompt_ids, index)

    def _store(self, request: GenerateRequest) -> None:
        tokens = (*request.prompt_ids, *request.output_ids)
        for block in chain_hashes(tokens, BLOCK_SIZE, salt=request.cache_salt):
            if block not in self.blocks:
                self.blocks[block] = None
                self._events.append(BlockStored(hashes=(block,)))

    def _push(self, ticket: Ticket) -> None:
        writer, _, request_id = ticket.ticket_id.partition("/")
        destination = self.peers[writer]
        if ticket.ticket_id not in destination.tickets:
            return  # given back, or the writer is in another life: fenced
        if self.loses_kv:
            lost = error_info(TransferFailed("the lane is gone"))
            destination.fail(request_id, lost)
        else:
            destination.arrived.add(ticket.ticket_id)
            destination.adopt(request_id)

    def move(self, asked: MoveRequest) -> None:
        """The sequence stops here at once, or stays."""
        self.moved.append(asked)
        sequence = self.running.get(asked.request_id)
        if sequence is None:
            return
        if self.clings:
            error = error_info(TransferFailed("the lane is gone"))
            self.say([(sequence, SequenceUpdate(request_id=asked.request_id, error=error))])
            return
        index, count = len(sequence.request.output_ids) + sequence.num_made, self.says_when_moving
        last = tuple(self.token(sequence.request, index + i) for i in range(count))
        moved = SequenceUpdate(
            request_id=asked.request_id,
            token_ids=last,
            logprobs=tuple(map(logprob, last)) if sequence.request.sampling.logprobs is not None else (),
            finish_reason=FinishReason.MOVED,
        )
        del self.running[asked.request_id]
        self.say([(sequence, moved)])
        self._push(asked.ticket)

    def adopt(self, request_id: str) -> None:
        """The KV of a submitted request is there: it may run."""
        sequence = self.running.get(request_id)
        ticket = sequence.request.ticket if sequence is not None else None
        if sequence is not None and not sequence.ready and ticket is not None and ticket.ticket_id in self.arrived:
            del self.tickets[ticket.ticket_id]
            sequence.ready = True
        self._work.set()

    def fail(self, request_id: str, error: Any) -> None:
        """A request has failed here, or will as soon as it is submitted."""
        if (sequence := self.running.pop(request_id, None)) is None:
            self.failed[request_id] = error
            return
        update = SequenceUpdate(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)
        self.say([(sequence, update)])

    def tell(self, *events: KVEvent) -> None:
        """Reports a cache, whatever `blocks` has."""
        self._events += events
        self.say()

    def drain(self) -> None:
        """Takes no more work, and says so."""
        self.draining = True
        self.say()

    def say(self, updates: list[tuple[Sequence, SequenceUpdate]] | None = None) -> None:
        """One step's message to each gateway."""
        self.load = replace(
            self.load,
            step=self.load.step + 1,
            num_running=len(self.running),
            num_tickets=len(self.tickets),
            draining=self.draining,
        )
        events = KVEvents(incarnation=self.incarnation, first_seq=self.next_seq, events=tuple(self._events))
        self.next_seq += len(self._events)
        self._events = []
        if self.skips and events.events:
            self.skips -= 1
            events = replace(events, first_seq=self.next_seq, events=())
        for gateway in self._gateways:
            own = [(sequence, update) for sequence, update in updates or () if sequence.gateway is gateway]
            short = [(sequence.request.number, update) for sequence, update in own if sequence.num_made > 1]
            short = [(number, update) for number, update in short if number and update.is_plain]
            message = StepMessage(
                updates=tuple(update for _, update in own if all(update is not delayed for _, delayed in short)),
                events=(events,),
                load=self.load,
                numbers=tuple(number for number, _ in short),
                token_ids=tuple(token_id for _, update in short for token_id in update.token_ids),
            )
            gateway.put_nowait(message)
        self._happened()

    # -- what gateways ask for -----------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        host, _, port = self.address.rpartition(":")
        lane = LaneAddress(
            worker_id=self.worker_id, incarnation=self.incarnation, host=host, port=int(port), key=LANE_KEY
        )
        named: dict[str, Any] = {
            "worker_id": self.worker_id, "incarnation": self.incarnation, "role": self.role, "model": "toy",
            "address": self.address, "layout": LAYOUT, "lane": lane, "max_model_len": 4096, "vocab_size": 1000,
            "adapters": tuple(self.adapters.values()),
        }  # fmt: skip
        return WorkerInfo(**named | self._info)

    def greet(self, hello: Hello, gateway: asyncio.Queue[StepMessage]) -> None:
        self.hellos.append(hello)
        stored = (BlockStored(hashes=tuple(self.blocks)),) if self.blocks else ()
        snapshot = KVEvents(incarnation=self.incarnation, first_seq=self.next_seq, events=stored, snapshot=True)
        gateway.put_nowait(StepMessage(events=(snapshot,), load=self.load))
        self._gateways[gateway] = hello
        self._happened()

    def load_adapter(self, name: str, path: str) -> Adapter:
        self.adapters[name] = Adapter(adapter_id=f"id of {path}", name=name, path=path, rank=8, num_bytes=1)
        self._announce()
        return self.adapters[name]

    def unload_adapter(self, name: str) -> bool:
        adapter = self.adapters.pop(name, None)
        self._announce()
        return adapter is not None

    def _announce(self) -> None:
        served = AdapterList(adapters=tuple(self.adapters.values()))
        for gateway in self._gateways:
            gateway.put_nowait(StepMessage(adapters=served))

    def forget(self, gateway: asyncio.Queue[StepMessage]) -> None:
        """Ends the stream, and with it all that its gateway requested."""
        self._gateways.pop(gateway, None)
        for sequence in [each for each in self.running.values() if each.gateway is gateway]:
            del self.running[sequence.request.request_id]
        for owner, request_id in self._reservations:
            if owner is gateway:
                self.tickets.pop(f"{self.worker_id}/{request_id}", None)
        self._happened()

    def submit(self, request: GenerateRequest, gateway: asyncio.Queue[StepMessage]) -> None:
        self.submitted.append(request)
        sequence = Sequence(request, gateway, ready=request.ticket is None or self._hands_over(request))
        if self.draining:
            refused = error_info(WorkerDraining(f"worker {self.worker_id} is draining"))
            update = SequenceUpdate(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=refused)
            self.say([(sequence, update)])
            return
        assert gateway in self._gateways, "hello comes first"
        self.running[request.request_id] = sequence
        if not sequence.ready and request.ticket is not None and request.ticket.ticket_id not in self.tickets:
            self.fail(request.request_id, error_info(TransferFailed("no such ticket here")))
        if request.request_id in self.failed:
            self.fail(request.request_id, self.failed[request.request_id])
        self.adopt(request.request_id)
        self._happened()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.pop(request_id, None)
        self.tickets.pop(f"{self.worker_id}/{request_id}", None)
        self._happened()

    async def reserve(self, asked: ReserveRequest) -> Ticket:
        self.reserved.append(asked)
        self._happened()
        gateway = next(stream for stream, hello in self._gateways.items() if hello.gateway_id == asked.gateway_id)
        if self.reserving is not None:
            await self.reserving.wait()
        if self.refuse is not None:
            raise self.refuse
        ticket_id = f"{self.worker_id}/{asked.request_id}"
        if (gateway, asked.request_id) in self._reservations and ticket_id not in self.tickets:
            raise TransferFailed(f"ticket {ticket_id} has ended")
        ticket = Ticket(
            ticket_id=ticket_id, generation=asked.generation, lease_s=asked.lease_s,
            block_ids=(1,), num_cached_tokens=0, layout=LAYOUT, destination=self.info().lane,
        )  # fmt: skip
        if gateway not in self._gateways:
            raise WorkerLost("the gateway has gone meanwhile")
        self.tickets[ticket.ticket_id] = ticket
        self._reservations.append((gateway, asked.request_id))
        return ticket

    def share(self, asked: ShareRequest) -> int:
        self.shared.append(asked)
        if self.refuse is not None:
            raise self.refuse
        return next((i for i, block in enumerate(asked.hashes) if block not in self.blocks), len(asked.hashes))


class Life(worker_pb2_grpc.WorkerServicer):
    """The service during one life of a worker: calls that outlive it reach nobody."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.incarnation = worker.incarnation

    def alive(self) -> bool:
        return self.worker.incarnation == self.incarnation

    async def Profile(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "it records nothing")

    async def Stream(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        gateway: asyncio.Queue[StepMessage] = asyncio.Queue()
        reader = asyncio.create_task(self._read(messages, gateway))
        try:
            while self.alive():
                yield to_proto(await gateway.get())
        finally:
            reader.cancel()
            self.worker.forget(gateway)

    async def _read(self, messages: AsyncIterator[Any], gateway: asyncio.Queue[StepMessage]) -> None:
        async for message in messages:
            self.worker.num_messages += 1
            for part in (message, *message.further):
                if not self.alive():
                    return
                self.hear(part, gateway)

    def hear(self, message: Any, gateway: asyncio.Queue[StepMessage]) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self.worker.greet(from_proto(Hello, message.hello), gateway)
        elif kind == "submit":
            self.worker.submit(from_proto(GenerateRequest, message.submit), gateway)
        elif kind == "move":
            self.worker.move(from_proto(MoveRequest, message.move))
        elif kind == "unread":
            self.worker.unread.append((message.unread.request_id, message.unread.is_unread))
        else:
            for request_id in message.abort.request_ids:
                self.worker.abort(request_id)

    async def Share(self, request: Any, context: Any) -> Any:
        try:
            return worker_pb2.ShareReply(num_blocks=self.worker.share(from_proto(ShareRequest, request)))
        except BatonError as error:
            await abort_with(context, error)

    async def Reserve(self, request: Any, context: Any) -> Any:
        try:
            if not self.alive():
                raise WorkerLost("too late")
            return to_proto(await self.worker.reserve(from_proto(ReserveRequest, request)))
        except BatonError as error:
            await abort_with(context, error)

    async def Describe(self, request: Any, context: Any) -> Any:
        return to_proto(self.worker.info())

    async def Abort(self, request: Any, context: Any) -> Any:
        return worker_pb2.AbortReply()

    async def ChangeRole(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        if self.worker.refuse is not None:
            await abort_with(context, self.worker.refuse)
        return to_proto(self.worker.load_adapter(request.name, request.path))

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        if not self.worker.unload_adapter(request.name):
            await abort_with(context, NotFound(f"no adapter {request.name!r} is loaded"))
        return worker_pb2.UnloadAdapterReply()

    async def Drain(self, request: Any, context: Any) -> Any:
        self.worker.drain()
        return worker_pb2.DrainReply(num_running=len(self.worker.running))

    async def Stats(self, request: Any, context: Any) -> Any:
        return to_proto(WorkerStats(info=self.worker.info(), load=self.worker.load))

    async def Health(self, request: Any, context: Any) -> Any:
        healthy = self.worker.healthy
        return to_proto(Health(healthy=healthy, reason="" if healthy else "no step finished for 60 s"))


def logprob(token: int) -> Logprobs:
    return Logprobs(chosen=TokenLogprob(token_id=token, logprob=-token / 1024))
