"""Gateway processes behind one port: starts N gateways like those of other hosts, and starts one that dies again.

    client ──▶ the common port (SO_REUSEPORT: the kernel chooses) ──▶ replica ──▶ workers
    scraper ─▶ the port of each replica                                  └──▶ Redis: prefix index, limits, workers

tend (one task a replica):  spawn ─▶ BeginReplica ─▶ ReplicaState, again and again ─▶ died, or silent: wait, spawn again
                                                                                └─▶ failed permanently: everything ends
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config.cluster_config import ClusterConfig
from cluster.discovery.members import Publish
from cluster.gateway.private_redis import PrivateRedis
from cluster.process.channel import MessageChannel, ProcessFailed
from cluster.process.life import live, spawn
from cluster.process.logs import LogFormat
from cluster.process.ports import listen, reserve, url_of
from cluster.process.scratch_dir import Scratch
from cluster.supervision import lifecycle
from cluster.supervision.lifecycle import Life, LifeState
from protos.codec import Messages
from protos.errors import BatonError, Unavailable
from protos.event_loop import Changed
from protos.wire import raised
from router.fleet_owner import CapacityOwner
from router.prefix.registry import MEMORY

log = logging.getLogger("baton.cluster")

PROGRAM = "from cluster.gateway.replica import main; main()"
LAST_WORDS_S = 3.0  # after the grace, for a process to end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginReplica:
    """The first message: the gateway's models, with the `addresses` of workers or `config.discovery`. `ports`: the one
    of each replica."""

    configs: tuple[ClusterConfig, ...]
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    log_format: LogFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """Sent when the replica listens, and every `supervision.health_period_s` from then on. `example`: a request to
    try."""

    is_ready: bool
    example: str


REPLICA_MESSAGES = Messages.of(BeginReplica, ReplicaState, ProcessFailed)


@dataclass(slots=True, eq=False)
class ReplicaSlot:
    """The place of one replica, with its own port, over its restarts."""

    own: socket.socket
    life: Life
    pid: int = 0
    is_up: bool = False
    is_heard: bool = False
    error: BatonError | None = None

    @property
    def port(self) -> int:
        return int(self.own.getsockname()[1])

    @property
    def is_ready(self) -> bool:
        return self.life.state is LifeState.SERVING


class Replicas:
    """The gateway in several processes, with the interface of a `GatewayServer`. Constructed on the event loop that
    runs it. Without `addresses` and `discovery` the caller announces workers with `announcer`.

    Raises Misconfigured if a port is taken, or without a Redis.
    """

    def __init__(
        self, configs: Sequence[ClusterConfig], *, addresses: tuple[str, ...] = (), log_format: LogFormat
    ) -> None:
        first, loop = configs[0], asyncio.get_running_loop()
        router = first.router
        has_workers = bool(addresses or first.discovery)
        with ExitStack() as undo:
            http = undo.enter_context(reserve(router.host, router.port, "--port"))
            grpc = undo.enter_context(reserve(router.host, router.grpc_port, "--grpc-port"))
            beyond = max(router.port, router.grpc_port) + 1
            self._slots = [
                ReplicaSlot(
                    undo.enter_context(listen(router.host, beyond + number if router.port else 0)),
                    lifecycle.initial(loop.time()),
                )
                for number in range(first.processes)
            ]
            scratch = Scratch(Path(tempfile.gettempdir()))  # no other user may read it
            undo.callback(scratch.remove)
            needs_redis = first.index == MEMORY or not has_workers
            self._redis = PrivateRedis(scratch.path) if needs_redis else None
            self._held = undo.pop_all()
        self.url = url_of(http, is_secure=bool(first.tls.cert))
        self.port, self.grpc_port = (int(end.getsockname()[1]) for end in (http, grpc))
        self.ports = tuple(slot.port for slot in self._slots)
        self._begin = BeginReplica(
            configs=tuple(self._of_replica(config, has_workers) for config in configs), addresses=addresses,
            ports=self.ports, log_format=log_format,
        )  # fmt: skip
        self._supervision = first.supervision
        self._clock = loop.time
        self._example = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = AsyncExitStack()
        self._stopping = False
        self._change = Changed()

    def _of_replica(self, config: ClusterConfig, has_workers: bool) -> ClusterConfig:
        """A replica's settings: the same ports, Redis for shared state, and its part of the queue."""
        url = self._redis.url if self._redis is not None else ""
        router, num = config.router, config.processes
        admission = replace(router.admission, max_queued=-(-router.admission.max_queued // num))
        return replace(
            config,
            index=url if config.index == MEMORY else config.index,
            discovery=config.discovery if has_workers else url,
            router=replace(router, port=self.port, grpc_port=self.grpc_port, admission=admission),
        )

    def example(self) -> str:
        return self._example

    async def start(self) -> None:
        """Returns when every replica answers; raises the BatonError of one that never will."""
        ports = ", ".join(map(str, self.ports))
        log.info("each gateway process has its own metrics and page, at a port of its own: %s", ports)
        if self._redis is not None:
            await self._redis.start()
        self._tasks = [asyncio.create_task(self._tend(slot), name=f"gateway at {slot.port}") for slot in self._slots]
        await self._until_all("is_up")

    async def announcer(self, fleet: str, owner: CapacityOwner) -> Publish:
        """Announces the workers of a fleet to the replicas, which reach the fleet's owner through Redis from now on."""
        from cluster.capacity.redis_fleet import serve_calls
        from cluster.discovery.redis_members import RedisAnnouncer, connect

        url, closing = self._begin.configs[0].discovery, self._closing
        announcer = RedisAnnouncer(await connect(url), fleet=fleet)
        closing.push_async_callback(lambda: announcer.close(withdraw=False))
        client = await closing.enter_async_context(await connect(url))
        closing.callback(asyncio.create_task(serve_calls(client, owner, fleet=fleet)).cancel)
        await announcer.own()
        return announcer.publish

    @property
    def serves(self) -> bool:
        return any(slot.is_ready for slot in self._slots)

    async def ready(self) -> None:
        await self._until_all("is_ready")

    async def wait(self) -> None:
        """Runs until `stop`; raises the BatonError of a replica that will never start."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self, grace_s: float) -> None:
        """Like `GatewayServer.stop`: running requests have `grace_s`. If cancelled, they fail immediately."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        living = [task for task in self._tasks if not task.done()]
        try:
            if living and grace_s:
                await asyncio.wait(living, timeout=grace_s + LAST_WORDS_S)
        finally:
            self._signal(signal.SIGINT)  # the second signal: at once
            if living:
                await asyncio.wait(living, timeout=LAST_WORDS_S)
            for task in living:
                task.cancel()
            await asyncio.gather(*living, return_exceptions=True)
            await self._closing.aclose()
            if self._redis is not None:
                await self._redis.close()
            self._held.close()

    # -- supervising ---------------------------------------------------------------------------------------------------

    async def _tend(self, slot: ReplicaSlot) -> None:
        while not self._stopping:
            error = await self._live(slot)
            if self._stopping:
                return
            if error is None:
                log.info("the gateway process at port %d has ended: the next one takes its place", slot.port)
                slot.life = lifecycle.drained(slot.life, self._clock())
                continue
            slot.life = lifecycle.failed(slot.life, error, self._clock(), self._supervision)
            self._change.notify()
            if slot.life.state is LifeState.FAILED_PERMANENTLY:
                raise error
            delay_s = slot.life.due_s - self._clock()
            log.warning(
                "the gateway process at port %d: %s; starting it again in %.2g s", slot.port, error.message, delay_s
            )
            await asyncio.sleep(delay_s)
            slot.life = lifecycle.restarted(slot.life, self._clock())

    async def _live(self, slot: ReplicaSlot) -> BatonError | None:
        """Runs a replica once. Returns its failure, or None if it served and then ended in order."""
        slot.error = None
        try:
            process, ours = await spawn(PROGRAM, slot.own.fileno())
        except OSError as error:
            return Unavailable(f"it cannot be started: {error.strerror or error}")
        channel = await MessageChannel.over(ours, REPLICA_MESSAGES)
        channel.send(self._begin)
        slot.pid = process.pid
        try:
            code = await live(process, self._follow(slot, channel), self._watch(slot))
        finally:
            slot.pid, slot.is_up = 0, False
            await channel.close()
        if slot.error is not None:
            return slot.error
        if code == 0 and slot.is_ready:
            return None
        return Unavailable(f"it ended with signal {-code}" if code < 0 else f"it ended with exit code {code}")

    async def _follow(self, slot: ReplicaSlot, channel: MessageChannel) -> None:
        while (message := await channel.receive()) is not None:
            if isinstance(message, ProcessFailed):
                slot.error = raised(message.error)
                continue
            slot.is_up = slot.is_heard = True
            self._example = message.example
            if message.is_ready and not slot.is_ready:
                slot.life = lifecycle.opened(slot.life, self._clock())
            self._change.notify()

    async def _watch(self, slot: ReplicaSlot) -> None:
        """Returns when a replica that was up is silent: its event loop hangs."""
        silence_s = self._supervision.max_failed_checks * self._supervision.health_period_s
        slot.is_heard = True
        while slot.is_heard:
            slot.is_heard = not slot.is_up
            await asyncio.sleep(silence_s)
        slot.error = Unavailable(f"it has not answered for {silence_s:g} s")

    def _signal(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.pid:
                with suppress(ProcessLookupError):
                    os.kill(slot.pid, number)

    async def _until_all(self, are: str) -> None:
        while not all(getattr(slot, are) for slot in self._slots):
            turn = asyncio.ensure_future(self._change.wait())
            done, _ = await asyncio.wait([turn, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
            for task in done:
                if task is not turn:
                    task.result()
