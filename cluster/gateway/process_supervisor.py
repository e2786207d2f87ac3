"""Supervises the gateway processes behind one port: starts them, passes connections and messages to them, restarts
them.

tend (one task a process):  spawn ─▶ Up: connections ─▶ Ready ─▶ ... ─▶ died, or hangs: wait, spawn again
                                                                   ├─▶ stopped in order, after a signal: spawn again
                                                                   └─▶ failed permanently: everything ends

Requests do not pass through here. Without Redis tenants' limits are enforced here for all processes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.capacity.calls import FleetCall, reply_to
from cluster.config.config import ClusterConfig
from cluster.gateway.connection_handoff import ConnectionHandoff
from cluster.gateway.messages import (
    CONTROL_MESSAGES,
    BeginProcess,
    ClusterDegraded,
    EnterTenant,
    Message,
    Ping,
    Pong,
    ProcessFailed,
    ProcessLeaving,
    ProcessReady,
    ProcessStatuses,
    ProcessUp,
    RequestEnded,
    StopProcess,
    TokensSpent,
    WorkerJoined,
    WorkerLeft,
    WorkerStarts,
)
from cluster.gateway.tenant_limits import Keeper
from cluster.process.channel import MessageChannel
from cluster.process.life import live
from cluster.process.logs import LogFormat
from cluster.process.ports import example, reserve, url_of
from cluster.process.scratch_dir import Scratch
from cluster.supervision import lifecycle
from cluster.supervision.lifecycle import Life, LifeState
from protos.errors import BatonError, Unavailable
from protos.event_loop import Changed
from protos.wire import raised
from router.fleet.successors import Successor
from router.fleet_owner import CapacityOwner, NoFleetOwner
from router.replicas.peers import ProcessStatus

log = logging.getLogger("baton.cluster")

PROGRAM = "from cluster.gateway.process import main; main()"
LAST_WORDS_S = 3.0  # after the grace, for a process to end by itself


@dataclass(slots=True, eq=False)
class ProcessSlot:
    """The place of one process, over its restarts."""

    number: int
    life: Life
    pid: int = 0
    control: MessageChannel | None = None
    is_up: bool = False
    is_leaving: bool = False
    error: BatonError | None = None
    num_unanswered: int = 0

    @property
    def is_ready(self) -> bool:
        return self.life.state is LifeState.SERVING

    def status(self) -> ProcessStatus:
        state = "ready" if self.is_ready else "leaving" if self.is_leaving else str(self.life.state)
        return ProcessStatus(number=self.number, pid=self.pid, state=state, reason=self.life.reason)


class GatewayProcesses:
    """The gateway in `config.processes` processes, with the interface of a `GatewayServer`. Constructed on the event
    loop that runs it. `fleet` passes on added and removed workers, unless the processes find workers themselves
    (`is_told` false).

    Raises Misconfigured if the port for gRPC is taken.
    """

    def __init__(
        self,
        config: ClusterConfig,
        listening: socket.socket,
        *,
        log_format: LogFormat,
        is_told: bool = True,
        addresses: tuple[str, ...] = (),
        fleet_owner: CapacityOwner | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config = config
        self._clock = loop.time
        self._grpc = reserve(config.router.host, config.router.grpc_port, "--grpc-port")
        self.grpc_port = int(self._grpc.getsockname()[1])
        self.url = url_of(listening, is_secure=bool(config.tls.cert))
        self.model = config.router.model_name
        self._has_chat = False
        self._handoff = ConnectionHandoff(listening)
        self._keeper = Keeper(loop.time)
        self._scratch = Scratch(Path(tempfile.gettempdir()))  # no other user may read it
        self._log_format = log_format
        self._is_told = is_told
        self._addresses = addresses
        self._fleet_owner = fleet_owner or NoFleetOwner()
        self._calls: set[asyncio.Task[None]] = set()
        self._workers: dict[str, str] = {}
        self._starting: dict[str, Successor] = {}
        self._degraded = ""
        self._slots = [ProcessSlot(number, lifecycle.initial(loop.time())) for number in range(config.processes)]
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = False
        self._stopping = False
        self._change = Changed()

    @property
    def fleet(self) -> GatewayProcesses:
        return self

    def example(self) -> str:
        """A request to try, as a curl command."""
        keys = bool(self._config.router.tenants)
        return example(self.url, self.model, has_chat=self._has_chat, asks_for_keys=keys)

    # -- workers -------------------------------------------------------------------------------------------------------

    def starting(self, worker_id: str, successor: Successor | None) -> None:
        if successor is None:
            self._starting.pop(worker_id, None)
        else:
            self._starting[worker_id] = successor
        self._broadcast(WorkerStarts(worker_id=worker_id, successor=successor))

    def add_worker(self, address: str, *, worker_id: str) -> None:
        self._starting.pop(worker_id, None)
        self._workers[worker_id] = address
        self._broadcast(WorkerJoined(worker_id=worker_id, address=address))

    async def remove_worker(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._starting.pop(worker_id, None)
        self._broadcast(WorkerLeft(worker_id=worker_id))

    def set_degraded(self, reason: str) -> None:
        self._degraded = reason
        self._broadcast(ClusterDegraded(reason=reason))

    # -- the faces -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when every process answers; raises the BatonError of one that never will."""
        self._tasks = [
            asyncio.create_task(self._keep_alive(slot), name=f"gateway {slot.number}") for slot in self._slots
        ]
        await self._until_all("is_up")

    @property
    def serves(self) -> bool:
        """Whether some process can serve a request."""
        return any(slot.is_ready for slot in self._slots)

    async def ready(self) -> None:
        """Returns once every process can serve a request."""
        await self._until_all("is_ready")

    async def wait(self) -> None:
        """Runs until `stop`; raises the BatonError of a process that will never start."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self, grace_s: float) -> None:
        """Like `GatewayServer.stop`: running requests have `grace_s`. If cancelled, they fail immediately."""
        self._stopping = True
        self._handoff.shut()
        self._broadcast(StopProcess(grace_s=grace_s))
        living = [task for task in self._tasks if not task.done()]
        try:
            if living and grace_s:
                await asyncio.wait(living, timeout=grace_s + LAST_WORDS_S)
        finally:
            self._broadcast(StopProcess(grace_s=0.0))
            if living:
                await asyncio.wait(living, timeout=LAST_WORDS_S)
            for task in living:
                task.cancel()
            await asyncio.gather(*living, return_exceptions=True)
            self._grpc.close()
            self._scratch.remove()

    # -- supervising ---------------------------------------------------------------------------------------------------

    async def _keep_alive(self, slot: ProcessSlot) -> None:
        while not self._stopping:
            error = await self._live(slot)
            if self._stopping:
                return
            if error is None:
                log.info("gateway process %d has ended: the next one takes its place", slot.number)
                slot.life = lifecycle.drained(slot.life, self._clock())
                continue
            slot.life = lifecycle.failed(slot.life, error, self._clock(), self._config.supervision)
            self._changed()
            if slot.life.state is LifeState.FAILED_PERMANENTLY:
                raise error
            delay_s = slot.life.due_s - self._clock()
            log.warning("gateway process %d: %s; starting it again in %.2g s", slot.number, error.message, delay_s)
            await asyncio.sleep(delay_s)
            slot.life = lifecycle.restarted(slot.life, self._clock())

    async def _live(self, slot: ProcessSlot) -> BatonError | None:
        """One life of a process. Returns its failure, or None if it served and then ended in order."""
        try:
            process, control = await self._spawn(slot)
        except OSError as error:
            return Unavailable(f"it cannot be started: {error.strerror or error}")
        slot.pid, slot.error = process.pid, None
        self._begin(slot, control)
        try:
            code = await live(process, self._follow(slot, control), self._watch_answers(slot, control))
        finally:
            self._clear(slot)
            await control.close()
        if slot.error is not None:
            return slot.error
        if code == 0 and slot.is_ready:
            return None
        return Unavailable(f"it ended with signal {-code}" if code < 0 else f"it ended with exit code {code}")

    async def _spawn(self, slot: ProcessSlot) -> tuple[asyncio.subprocess.Process, MessageChannel]:
        """Raises OSError, and releases everything, if the machine cannot start another process."""
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            inherited = (theirs, self._handoff.open(slot.number))
            undo.callback(self._handoff.lose, slot.number)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PROGRAM, *(str(one.fileno()) for one in inherited),
                pass_fds=[one.fileno() for one in inherited], stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            undo.pop_all()
        return process, await MessageChannel.over(ours, CONTROL_MESSAGES)

    def _clear(self, slot: ProcessSlot) -> None:
        slot.control, slot.is_up, slot.is_leaving, slot.pid = None, False, False, 0
        self._handoff.lose(slot.number)
        self._keeper.lost(slot.number)

    def _begin(self, slot: ProcessSlot, control: MessageChannel) -> None:
        """BeginProcess is the first message."""
        control.send(
            BeginProcess(
                config=replace(self._config, router=replace(self._config.router, grpc_port=self.grpc_port)),
                number=slot.number,
                count=len(self._slots),
                folder=self._scratch.path,
                log_format=self._log_format,
                is_told=self._is_told,
                addresses=self._addresses,
            )
        )
        for worker_id, address in self._workers.items():
            control.send(WorkerJoined(worker_id=worker_id, address=address))
        for worker_id, successor in self._starting.items():
            control.send(WorkerStarts(worker_id=worker_id, successor=successor))
        control.send(ClusterDegraded(reason=self._degraded))
        slot.control = control
        self._changed()

    async def _follow(self, slot: ProcessSlot, control: MessageChannel) -> None:
        while (message := await control.receive()) is not None:
            await self._handle(slot, control, message)

    async def _handle(self, slot: ProcessSlot, control: MessageChannel, message: Message) -> None:
        match message:
            case ProcessUp(model=model, has_chat=has_chat):
                self.model, self._has_chat = model, has_chat
                slot.is_up = True
                self._handoff.admit(slot.number)
                self._changed()
            case ProcessReady():
                slot.life = lifecycle.opened(slot.life, self._clock())
                self._changed()
            case ProcessFailed(error=error):
                slot.error = raised(error)
            case ProcessLeaving():
                slot.is_leaving = True
                self._handoff.dismiss(slot.number)
                self._changed()
            case EnterTenant():
                control.send(await self._keeper.decide(slot.number, message))
            case TokensSpent():
                self._keeper.spent(message)
            case RequestEnded():
                self._keeper.gone(slot.number, message)
            case FleetCall():
                task = asyncio.create_task(self._reply(control, message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case Pong():
                slot.num_unanswered = 0

    async def _reply(self, control: MessageChannel, call: FleetCall) -> None:
        control.send(await reply_to(call, self._fleet_owner))

    async def _watch_answers(self, slot: ProcessSlot, control: MessageChannel) -> None:
        """Returns when a process that was up no longer answers: its event loop hangs."""
        config = self._config.supervision
        slot.num_unanswered = 0
        while slot.num_unanswered < config.max_failed_checks:
            await asyncio.sleep(config.health_period_s)
            if slot.is_up:
                slot.num_unanswered += 1
                control.send(Ping())
        slot.error = Unavailable(f"it has not answered for {config.max_failed_checks * config.health_period_s:g} s")

    # ------------------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        statuses = tuple(slot.status() for slot in self._slots)
        self._settled = self._settled or all(slot.is_ready for slot in self._slots)
        self._broadcast(ProcessStatuses(statuses=statuses, settled=self._settled))
        self._change.notify()

    def _broadcast(self, message: Message) -> None:
        for slot in self._slots:
            if slot.control is not None:
                slot.control.send(message)

    async def _until_all(self, are: str) -> None:
        while not all(getattr(slot, are) for slot in self._slots):
            turn = asyncio.ensure_future(self._change.wait())
            done, _ = await asyncio.wait([turn, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
            for task in done:
                if task is not turn:
                    task.result()
