"""One gateway process of several: a whole gateway that gets its connections, and often its workers, from its
supervisor.

start: BeginProcess ─▶ ProcessUp: connections come ─▶ ProcessReady
stop:  StopProcess, a signal, or a lost supervisor ─▶ no more connections ─▶ running requests finish ─▶ end
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress
from dataclasses import replace

from cluster.capacity.calls import FleetReply, SupervisedFleetOwner
from cluster.discovery.base import Discovery, Members
from cluster.gateway.connection_handoff import ConnectionReceiver
from cluster.gateway.messages import (
    CONTROL_MESSAGES,
    BeginProcess,
    ClusterDegraded,
    Message,
    Ping,
    Pong,
    ProcessFailed,
    ProcessLeaving,
    ProcessReady,
    ProcessStatuses,
    ProcessUp,
    TenantEntered,
    WorkerJoined,
    WorkerLeft,
    WorkerStarts,
)
from cluster.gateway.messages import StopProcess as StopOrder
from cluster.gateway.run import discovery_of, follow, found_owner, max_model_len_of
from cluster.gateway.server import GatewayServer
from cluster.gateway.tenant_limits import KeptLimits
from cluster.process.channel import MessageChannel
from cluster.process.gc_tuning import collect_rarely
from cluster.process.logs import terminal
from cluster.process.signals import StopSignal
from protos.errors import BatonError
from protos.wire import error_info
from router.fleet.fleet import STATE_LINE
from router.prefix.registry import MEMORY
from router.replicas.peers import PeerProcesses

log = logging.getLogger("baton.cluster")

LAST_CONNECTIONS_S = 1.0  # for connections on their way when the process stops


class ToldDiscovery:
    """Discovery from the supervisor's messages."""

    trouble = ""

    def __init__(self) -> None:
        self._news: asyncio.Queue[WorkerStarts | WorkerJoined | WorkerLeft | ClusterDegraded] = asyncio.Queue()

    def hear(self, news: WorkerStarts | WorkerJoined | WorkerLeft | ClusterDegraded) -> None:
        self._news.put_nowait(news)

    async def follow(self, members: Members) -> None:
        while True:
            match await self._news.get():
                case WorkerStarts(worker_id=worker_id, successor=successor):
                    members.starting(worker_id, successor)
                case WorkerJoined(worker_id=worker_id, address=address):
                    members.add_worker(address, worker_id=worker_id)
                case WorkerLeft(worker_id=worker_id):
                    await members.remove_worker(worker_id)
                case ClusterDegraded(reason=reason):
                    members.set_degraded(reason)


class GatewayProcess:
    """The parts of the process. `run` raises BatonError if it cannot start."""

    def __init__(self, orders: BeginProcess, control: MessageChannel, end: socket.socket) -> None:
        config = orders.config
        self._orders = orders
        self._control = control
        self._stop = StopSignal()
        self._grace_s = config.supervision.grace_s
        self._processes = PeerProcesses(folder=orders.folder, number=orders.number, count=orders.count)
        self._told = ToldDiscovery()
        # Without Redis the supervisor enforces tenants' limits; each process has an equal part of the queue.
        self._limits = KeptLimits(control) if config.index == MEMORY else None
        self._owner = SupervisedFleetOwner(control)
        admission = config.router.admission
        self._front = GatewayServer(
            replace(config.router, admission=replace(admission, max_queued=-(-admission.max_queued // orders.count))),
            None,
            max_model_len=max_model_len_of(config),
            tls=config.tls,
            peers=config.peers,
            index=config.index,
            processes=self._processes,
            limits=self._limits,
            fleet_owner=self._owner if orders.is_told else found_owner(config),
        )
        self._threshold = ConnectionReceiver(end, self._take)

    async def run(self) -> None:
        """Runs until a message or signal stops it, and returns once it has stopped in order."""
        obeying = asyncio.create_task(self._obey(), name="control")
        try:
            if await self._stop.before(self._serve()):
                return
            self._control.send(ProcessLeaving())
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_CONNECTIONS_S):
                    await self._threshold.closed.wait()
            await self._stop.patiently(self._front.stop(self._grace_s))
        finally:
            obeying.cancel()
            await self._front.stop(0.0)
            self._threshold.close()

    def _take(self, connection: socket.socket) -> None:
        self._front.adopt(connection, self._threshold.ended)

    async def _serve(self) -> None:
        orders, front = self._orders, self._front
        await front.start()
        collect_rarely()
        found: Discovery = (
            self._told if orders.is_told else await discovery_of(orders.config, orders.addresses, front.channels)
        )
        self._control.send(ProcessUp(model=front.model, has_chat=front.has_chat))
        telling = asyncio.create_task(self._report_ready(), name="ready")
        try:
            await follow(front, found)
        finally:
            telling.cancel()

    async def _report_ready(self) -> None:
        await self._front.ready()
        self._control.send(ProcessReady())

    async def _obey(self) -> None:
        while (message := await self._control.receive()) is not None:
            self._handle(message)
        log.warning("the supervisor of gateway process %d is gone: the process ends", self._orders.number)
        self._stop.requested.set()

    def _handle(self, message: Message) -> None:
        match message:
            case WorkerStarts() | WorkerJoined() | WorkerLeft() | ClusterDegraded():
                self._told.hear(message)
            case ProcessStatuses(statuses=statuses, settled=settled):
                self._processes.statuses, self._processes.settled = statuses, settled
            case TenantEntered() if self._limits is not None:
                self._limits.answered(message)
            case FleetReply():
                self._owner.answered(message)
            case Ping():
                self._control.send(Pong())
            case StopOrder(grace_s=grace_s):
                self._grace_s = grace_s
                (self._stop.requested if grace_s else self._stop.forced).set()
                self._stop.requested.set()


def is_news(record: logging.LogRecord) -> bool:
    """False for the log of workers' states, which the first process alone writes."""
    return record.msg != STATE_LINE or record.levelno > logging.INFO


async def run(control_end: socket.socket, connections_end: socket.socket) -> int:
    """Returns the exit code."""
    control = await MessageChannel.over(control_end, CONTROL_MESSAGES)
    orders = await control.receive()
    if not isinstance(orders, BeginProcess):
        return 1  # the supervisor has ended before its first message
    terminal(orders.log_format, access_log=orders.config.router.http.access_log)
    if orders.number:
        logging.getLogger("baton.router").addFilter(is_news)
    try:
        await GatewayProcess(orders, control, connections_end).run()
    except BatonError as error:
        control.send(ProcessFailed(error=error_info(error)))
        return 1
    finally:
        await control.close()
    return 0


def main() -> None:
    """`argv`: the inherited file descriptors of the control channel and of the connections."""
    import uvloop

    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    control, connections = (socket.socket(fileno=int(one)) for one in sys.argv[1:3])
    sys.exit(uvloop.run(run(control, connections)))
