"""A worker: an engine on its thread behind a gRPC server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc

from kvtransfer.lane_rules import why_unhealthy
from protos import worker_pb2_grpc
from protos.errors import Misconfigured, WorkerDraining, WorkerLost
from protos.listening import netloc
from protos.tls import PeerTls, listen_grpc
from protos.values import LaneStats, TicketStats, WorkerInfo, WorkerRole, WorkerStats
from workers.engine.engine import Engine
from workers.rpc.loop import ThreadedEngineLoop
from workers.rpc.role_change import MakeRole, RoleChange
from workers.rpc.worker_servicer import Reserve, WorkerServicer, new_server

LAST_WORDS_S = 1.0


class WakeUp:
    """Wakes a worker: lanes call `notify` when there is something to poll. It has no effect until the worker has set
    the listener."""

    def __init__(self) -> None:
        self.listener: Callable[[], None] | None = None

    def notify(self) -> None:
        """Calls the listener. Callable from any thread."""
        if self.listener is not None:
            self.listener()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts that a pool composes. `reserve` and `tickets` belong to a role that receives KV, `lanes` to a role that
    sends or receives it. `roles` are those that it can change into. `close` frees ranks, lanes and stores; it is called
    last, when the engine's thread has ended."""

    info: WorkerInfo
    engine: Engine
    close: Callable[[], None]
    reserve: Reserve | None = None
    tickets: Callable[[float], Sequence[TicketStats]] = lambda now: ()
    lanes: Callable[[], Sequence[LaneStats]] = tuple
    wake_up: WakeUp = field(default_factory=WakeUp)
    roles: Mapping[WorkerRole, MakeRole] = field(default_factory=dict)


class Worker:
    """A worker's life: create it, `start`, then `wait` (until it breaks or `stop` is called). It lives on one event
    loop."""

    def __init__(
        self, parts: WorkerParts, *, clock: Callable[[], float] = time.monotonic, stall_s: float = 60.0
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._stall_s = stall_s
        self._server: grpc.aio.Server | None = None
        self._loop: ThreadedEngineLoop | None = None
        self._servicer: WorkerServicer | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._role_change: RoleChange | None = None
        self._changed: Callable[[WorkerInfo], None] = lambda info: None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.info = parts.info

    async def start(
        self,
        host: str,
        port: int = 0,
        *,
        peers: PeerTls | None = None,
        prepare: Callable[[], None] | None = None,
        supervised: Callable[[], None] = lambda: None,
        changed: Callable[[WorkerInfo], None] = lambda info: None,
    ) -> WorkerInfo:
        """Serves on host:port (0: any free one), and returns the info with the address. `prepare` runs first on the
        engine's thread; `supervised` is called whenever a supervisor queries the worker's health, `changed` with the
        new info when the worker has another role. Without a token in
        `peers` the worker answers every call. Raises Misconfigured when the port is taken, or the certificates of
        `peers` cannot be read."""
        credentials = peers.server_credentials() if peers is not None else None
        server = new_server(peers.token if peers is not None else "")
        try:
            bound = listen_grpc(server, host, port, credentials)
        except RuntimeError as error:
            raise Misconfigured(
                f"cannot listen on {netloc(host, port)}: {error}; choose another port", param="port"
            ) from error
        self.info, self._changed = replace(self._parts.info, address=netloc(host, bound)), changed
        servicer = WorkerServicer(
            info=self.info,
            engine=self._parts.engine,
            clock=self._clock,
            stats=self._stats,
            reserve=self._parts.reserve,
            leave=self.leave,
            change_role=self._order_role,
            supervised=supervised,
        )
        self._servicer = servicer
        self._loop = ThreadedEngineLoop(
            self._parts.engine,
            clock=self._clock,
            publish=servicer.publish,
            on_fault=self._fault,
            stall_s=self._stall_s,
            why_unhealthy=lambda: why_unhealthy(self._parts.lanes()),
        )
        servicer.attach(self._loop)
        self._role_change = RoleChange(
            self.info.role, self._parts.roles, engine=self._parts.engine, loop=self._loop, servicer=servicer,
            idle=self._loop.idle, changed=self._note_role,
        )  # fmt: skip
        self._parts.wake_up.listener = self._loop.wake
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
        if prepare is not None:
            self._loop.post(prepare)
        self._loop.start()
        await server.start()
        self._server = server
        return self.info

    async def wait(self) -> None:
        """Returns after `stop`, or when the worker has left; raises WorkerLost if the engine broke. The process should
        then end."""
        await asyncio.shield(self._ended)

    def leave(self) -> None:
        """Accepts no new work; `wait` returns once no request and no transfer runs here. Idempotent."""
        if self._leaving is None:
            self._cancel_role_change()
            self._leaving = asyncio.create_task(self._leave(), name=f"leaving of {self.info.worker_id}")

    async def _leave(self) -> None:
        assert self._loop is not None, "start() comes first"
        assert self._servicer is not None
        await self._loop.call(self._parts.engine.drain)
        await self._loop.idle()
        await self._servicer.disowned()
        self._servicer.end_streams()
        if not self._ended.done():
            self._ended.set_result(None)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops accepting calls, lets open calls finish for `grace_s`, ends the engine and frees everything. Streams
        end after the messages that are queued, which have at least `LAST_WORDS_S`. Idempotent."""
        server, loop = self._server, self._loop
        self._cancel_role_change()
        self._server = self._loop = None
        if self._leaving is not None:
            self._leaving.cancel()
        if server is not None and self._servicer is not None:
            self._servicer.end_streams()
            await server.stop(max(grace_s, LAST_WORDS_S))
        if loop is not None:
            await loop.stop()
            await asyncio.to_thread(self._parts.close)
        if not self._ended.done():
            self._ended.set_result(None)

    def _order_role(self, role: WorkerRole | None) -> None:
        if role is not None and self._leaving is not None:
            raise WorkerDraining(f"worker {self.info.worker_id} is ending: its successor starts in the new role")
        if self._role_change is not None and (role is not None or self._leaving is None):
            self._role_change.order(role)

    def _cancel_role_change(self) -> None:
        if self._role_change is not None:
            self._role_change.cancel()

    def _note_role(self, role: WorkerRole) -> None:
        self.info = replace(self.info, role=role)
        self._changed(self.info)

    def _fault(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(WorkerLost(f"worker {self.info.worker_id}: the engine failed: {error}"))

    def _stats(self) -> WorkerStats:
        adapters = self._parts.engine.adapters
        served = adapters.served.adapters if adapters is not None else ()
        return WorkerStats(
            info=replace(self.info, adapters=served),
            load=self._parts.engine.load(),
            tickets=tuple(self._parts.tickets(self._clock())),
            lanes=tuple(self._parts.lanes()),
            tiers=self._parts.engine.pool.tiers(),
        )
