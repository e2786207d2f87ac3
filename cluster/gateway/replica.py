"""One gateway process of several, which differs from a gateway on its own in its ports and in its parent.

start: BeginReplica ─▶ it listens, ReplicaState ─▶ workers are found, ReplicaState ─▶ ...
stop:  a signal, or a lost parent ─▶ running requests finish ─▶ end
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

from cluster.gateway.gateway_server import GatewayServer
from cluster.gateway.replicas import REPLICA_MESSAGES, BeginReplica, ReplicaState
from cluster.gateway.run import addresses_by_model, open_server, serve
from cluster.process.channel import MessageChannel, ProcessFailed
from cluster.process.logs import terminal
from cluster.process.signals import StopSignal
from protos.errors import BatonError
from protos.listening import bound
from protos.wire import error_info

log = logging.getLogger("baton.cluster")


async def run(parent: socket.socket, own: socket.socket) -> int:
    """Serves at the common port and at its `own` until a signal. Returns the exit code."""
    stop, channel = StopSignal(), await MessageChannel.over(parent, REPLICA_MESSAGES)
    begin = await channel.receive()
    if not isinstance(begin, BeginReplica):
        return 1  # the parent has ended before its first message
    config, front = begin.configs[0], None
    terminal(begin.log_format, access_log=config.router.http.access_log)
    common = bound(config.router.host, config.router.port, option=socket.SO_REUSEPORT)
    watching = asyncio.create_task(_stop_with(channel, stop))
    try:
        front = open_server(begin.configs, common, own=own, replica_ports=begin.ports)
        workers = addresses_by_model(begin.configs, begin.addresses)
        report = _report(front, channel, config.supervision.health_period_s)
        if not await stop.before(serve(front, begin.configs, workers, report)):
            await stop.patiently(front.stop(config.supervision.grace_s))
        return 0
    except BatonError as error:
        channel.send(ProcessFailed(error=error_info(error)))
        return 1
    finally:
        watching.cancel()
        if front is not None:
            await front.stop(0.0)
        await channel.close()


async def _report(front: GatewayServer, channel: MessageChannel, period_s: float) -> None:
    """Sends this process's state every `period_s`. The parent ends a process that sends none: its event loop hangs."""
    ready = asyncio.create_task(front.ready())
    try:
        while True:
            channel.send(ReplicaState(is_ready=ready.done(), example=front.example()))
            await (asyncio.sleep(period_s) if ready.done() else asyncio.wait([ready], timeout=period_s))
    finally:
        ready.cancel()


async def _stop_with(channel: MessageChannel, stop: StopSignal) -> None:
    await channel.receive()  # the parent sends nothing more
    log.warning("the parent of this gateway process is gone: the process ends")
    stop.requested.set()


def main() -> None:
    """Runs a replica. `argv`: inherited descriptors of the channel to the parent and of the replica's own port."""
    import uvloop

    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    parent, own = (socket.socket(fileno=int(one)) for one in sys.argv[1:3])
    sys.exit(uvloop.run(run(parent, own)))
