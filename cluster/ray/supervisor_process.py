"""The supervisor's process: it loads Ray's library, and serves nothing. It may end at any time, also killed by Ray: its
parent (`cluster.ray.pools`) starts the next one, which continues with the same workers.

begin ─▶ running workers are adopted │ Ray is started, or found ─▶ plan, places ─▶ launch missing workers ─▶ ...
Ray is lost: the process ends immediately, and leaves the workers running
StopWorkers: workers end ─▶ Ray ends ─▶ the process ends          the parent is gone: everything ends
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.config.cluster_config import ClusterConfig
from cluster.config.revised import revised
from cluster.process.channel import MessageChannel, Ping, Pong, ProcessFailed
from cluster.process.logs import FIELDS
from cluster.process.scratch_dir import PREFIX, kill_users
from cluster.process.signals import SIGNALS
from cluster.ray.actors import RayNodes
from cluster.ray.hosts import ThisMachine
from cluster.ray.launcher import RankLauncher
from cluster.ray.places import ManyMachines, OneMachine, RayShares
from cluster.ray.ray_session import Machines
from cluster.ray.supervisor_messages import (
    SUPERVISOR_MESSAGES,
    Begin,
    Drain,
    Drained,
    LogLine,
    Planned,
    ProcessEnded,
    RayAway,
    Resize,
    Resized,
    StartupStep,
    StopWorkers,
    Viewed,
    WorkerJoined,
    WorkerLeft,
    WorkerRecorded,
    WorkersStopped,
    WorkerStarting,
)
from cluster.supervision.health import WorkerCalls
from cluster.supervision.living import LivingWorker
from cluster.supervision.supervisor import RunningWorker, SupervisedWorker, Supervisor
from cluster.supervision.worker_placement import (
    NodeResources,
    WorkerPlan,
    check_cores,
    check_fits,
    joined,
    plan,
    replan,
    shared_cpus,
    why_not_gpus,
)
from protos.errors import BatonError, Internal, Misconfigured, Unavailable
from protos.hints import encodable
from protos.wire import error_info
from router.fleet.channels import Channels
from router.fleet.successors import Successor
from workers.worker_config import Device

log = logging.getLogger("baton.cluster")

AGAIN_S = 1.0  # between two checks for a Ray that was there before
LAST_WORDS_S = 1.0
MAX_ENDED = 1024  # exit statuses that no link has read
EXIT_RAY_LOST = 75  # EX_TEMPFAIL of sysexits.h


class ParentAnnouncer:
    """An `Announcer` that sends announcements to the parent, which knows the gateways."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel

    async def starting(self, worker_id: str, successor: Successor) -> None:
        self._channel.send(WorkerStarting(worker_id=worker_id, successor=successor))

    async def announce(self, worker_id: str, address: str) -> None:
        self._channel.send(WorkerJoined(worker_id=worker_id, address=address))

    async def withdraw(self, worker_id: str) -> None:
        self._channel.send(WorkerLeft(worker_id=worker_id))

    async def close(self) -> None:
        """Nothing is stored here."""


class SupervisorProcess:
    """Starts, watches and stops workers and Ray for the process that started it, on one event loop."""

    def __init__(self, begin: Begin, channel: MessageChannel) -> None:
        self._begin = begin
        self._config: ClusterConfig = begin.config
        self._channel = channel
        self._machines = Machines(begin.config.ray, Path(begin.folder), begin.part)
        self._ended: dict[int, int] = {}
        self._living = {living.worker_id: living for living in begin.living}
        self._places: OneMachine | ManyMachines = ManyMachines()
        if self._machines.is_private:
            this_machine = ThisMachine(
                Path(begin.folder), begin.lock, lambda pid: self._ended.pop(pid, None),
                contact_s=begin.config.supervision.orphan_timeout_s,
            )  # fmt: skip
            self._places = OneMachine(this_machine, {one.worker_id: one.devices for one in begin.living})
        self._launcher = RankLauncher(begin.config, self._places, self._record)
        self._plans, self._is_planned = begin.plans, begin.is_planned
        self._device: Device = begin.plans[0].device if begin.plans else begin.config.worker.device
        self._control = WorkerCalls(Channels(begin.config.peers))
        self._supervisor: Supervisor | None = None
        self._doubts: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._first_ended: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Runs until the workers are stopped, Ray is lost, or the parent is gone. Returns the exit code."""
        obeying, supervising = asyncio.create_task(self._obey()), asyncio.create_task(self._supervise())
        await asyncio.wait([obeying, supervising], return_when=asyncio.FIRST_COMPLETED)
        if obeying.done():
            is_told = obeying.result()
            supervising.cancel()
            await (self._stop() if is_told else self._end_everything())
            return 0
        try:
            supervising.result()
        except BatonError as error:
            self._channel.send(ProcessFailed(error=error_info(error)))
            await self._stop()
            return 1
        return EXIT_RAY_LOST  # the workers continue

    # ------------------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Returns when Ray is lost. Raises the BatonError of a worker that will never start, or of the first start of
        Ray."""
        if self._is_planned:
            self._start_supervisor()
        self._watching = self._begin_task(self._ray(), "Ray")
        (await self._first_ended).result()

    def _begin_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task whose failure ends supervision."""

        def note(ended: asyncio.Task[None]) -> None:
            if not self._first_ended.done():
                self._first_ended.set_result(ended)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(note)
        self._tasks.append(task)
        return task

    async def _ray(self) -> None:
        """One Ray, from its start to its loss."""
        if not await self._started():
            return
        if not self._is_planned:
            self._plans, self._is_planned = self._plan(await self._machines.nodes()), True
            self._channel.send(Planned(plans=self._plans))
            self._start_supervisor()
        keeping = asyncio.create_task(self._keep(RayShares(self._machines)))
        try:
            reason = await self._machines.lost(self._doubt)
        finally:
            keeping.cancel()
        self._doubt(reason)

    async def _started(self) -> bool:
        """Raises Misconfigured if there has never been a Ray at the address; waits for one that was there."""
        address = self._config.ray.address
        what = f"connecting to Ray at {address}" if address else "starting Ray"
        self._channel.send(StartupStep(what=what))
        try:
            while True:
                try:
                    await self._machines.start()
                    return True
                except Misconfigured as error:
                    if not self._is_planned or not address:
                        raise
                    self._doubt(error.message.partition(";")[0])
                    await asyncio.sleep(AGAIN_S)
        except Unavailable as error:
            self._doubt(error.message)
            return False
        finally:
            self._channel.send(StartupStep(what=what, is_over=True))

    async def _keep(self, shares: RayShares) -> None:
        """Reserves places in this Ray for running workers, too."""
        try:
            if isinstance(self._places, OneMachine):
                self._places.use(shares)
                await self._places.keep((*self._plans, *self._begin.leaving))
            else:
                run = Path(self._begin.folder).name.removeprefix(PREFIX)
                orphan_s = self._config.supervision.orphan_timeout_s
                nodes = RayNodes(self._machines, run, orphan_s, lambda name, reason: self._doubt(reason, name))
                self._places.use(shares, nodes)
        except Exception as error:  # the task is never awaited
            log.exception("Ray could not reserve what workers have")
            self._doubt(f"Ray could not reserve what workers have: {type(error).__name__}: {error}", "places")
        self._doubt("")

    def _doubt(self, reason: str, what: str = "Ray") -> None:
        """Reports a fault of `what`; "" when it is over."""
        if reason:
            self._doubts[what] = reason
        else:
            self._doubts.pop(what, None)
        self._channel.send(RayAway(reason="; ".join(dict.fromkeys(self._doubts.values()))))

    def _plan(self, nodes: tuple[NodeResources, ...]) -> tuple[WorkerPlan, ...]:
        """Raises Misconfigured if the machines cannot hold it."""
        config = revised(self._config, self._begin.revision)
        tp, device = config.worker.tp, config.worker.device
        if self._machines.is_private:
            check_fits(config.pools, nodes, tp=tp, device=device)
        plans = plan(
            config.pools, nodes, tp=tp, device=device, pool_resources=config.ray.pool_resources,
            span_nodes=config.ray.span_nodes, fleet=config.fleet, revision=self._begin.revision,
        )  # fmt: skip
        if device == "auto" and any(node.gpus for node in nodes) and plans[0].device == "cpu":
            there = joined(nodes) if config.ray.span_nodes else nodes
            log.warning("running on CPUs: %s", why_not_gpus(config.pools, there, tp=tp))
        if self._machines.is_private and (shared := shared_cpus(plans, nodes)):
            log.warning("%s", shared)
        return plans

    def _start_supervisor(self) -> None:
        plans = {plan.worker_id: plan for plan in (*self._plans, *self._begin.leaving)}
        running = {worker_id: RunningWorker(has_served=True) for worker_id in self._begin.have_served}
        for worker_id, living in self._living.items():
            running[worker_id] = RunningWorker(
                has_served=worker_id in self._begin.have_served,
                incarnation=living.incarnation,
                info=living.info,
                follow=partial(self._launcher.adopt, plans[worker_id], living),
            )
        self._supervisor = Supervisor(
            self._plans,
            launcher=self._launcher,
            announcer=ParentAnnouncer(self._channel),
            control=self._control,
            config=self._config.supervision,
            first_incarnation=time.time_ns() // 1_000_000,
            running=running,
            leaving=self._begin.leaving,
            watch=self._show,
        )
        self._begin_task(self._supervisor.run(), "supervisor")

    def _record(self, living: LivingWorker) -> None:
        self._living[living.worker_id] = living
        self._channel.send(WorkerRecorded(living=living))

    def _show(self, view: SupervisedWorker) -> None:
        self._channel.send(Viewed(view=view))
        living = self._living.get(view.worker_id)
        if living is not None and living.incarnation == view.incarnation and living.info != view.info:
            self._record(replace(living, info=view.info))

    # ------------------------------------------------------------------------------------------------------------------

    async def _obey(self) -> bool:
        """True if a stop was requested, False if the parent is gone."""
        while (message := await self._channel.receive()) is not None:
            match message:
                case ProcessEnded(pid=pid, status=status):
                    self._ended[pid] = status
                    if len(self._ended) > MAX_ENDED:
                        del self._ended[next(iter(self._ended))]  # the oldest
                case Ping():
                    self._channel.send(Pong())
                case Resize():
                    self._resizing = asyncio.create_task(self._resize(message))
                case Drain(grace_s=grace_s):
                    self._draining = asyncio.create_task(self._drain(grace_s))
                case StopWorkers():
                    return True
        return False

    async def _resize(self, order: Resize) -> None:
        error: BatonError | None = None
        try:
            await self._try_resizing(order)
        except BatonError as failed:
            error = failed
        except Exception as failed:
            log.exception("the pools could not be resized: internal error")
            error = Internal(f"{type(failed).__name__}: {failed}")
        if self._supervisor is not None:
            self._channel.send(Planned(plans=self._supervisor.plans))
        error_sent = error_info(error) if error is not None else None
        self._channel.send(Resized(number=order.number, error=error_sent))

    async def _try_resizing(self, order: Resize) -> None:
        """Raises BatonError."""
        nodes = await self._known_nodes()
        assert self._supervisor is not None, "Ray is used only by a supervisor"
        kept = self._supervisor.plans
        config = revised(self._config, order.revision)
        self._device = kept[0].device if kept else self._device  # also of workers after a sleep
        pools, tp = config.pools.with_counts(order.counts), config.worker.tp
        if self._machines.is_private:
            both = {role: count + order.kept.get(role, 0) for role, count in order.counts.items()}
            check_fits(config.pools.with_counts(both), nodes, tp=tp, device=self._device)
            if self._device == "cpu" and sum(both.values()) > len(kept):
                check_cores(config.pools.with_counts(both), nodes, tp=tp)
        plans = replan(
            kept, pools, nodes, tp=tp, device=self._device, pool_resources=config.ray.pool_resources,
            span_nodes=config.ray.span_nodes, flips=order.flips, fleet=config.fleet,
            revision=order.revision, others=order.kept,
        )  # fmt: skip
        self._channel.send(Planned(plans=plans, number=order.number))
        await self._supervisor.resize(plans)

    async def _known_nodes(self) -> tuple[NodeResources, ...]:
        """Raises Unavailable without Ray, also if it is lost meanwhile."""
        reason = "; ".join(self._doubts.values()) or self._places.trouble
        if not reason and self._supervisor is not None:
            try:
                return await self._machines.nodes()
            except Exception as error:  # Ray raises plain Exceptions
                reason = f"Ray cannot list its nodes: {error}"
        raise Unavailable(f"{reason or 'no worker has been planned yet'}: try again later")

    async def _drain(self, grace_s: float) -> None:
        if self._supervisor is not None:
            serving = self._supervisor.serving().values()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(*(self._control.drain(info.address) for info in serving))
        self._channel.send(Drained())

    async def _stop(self) -> None:
        """Stops workers, then Ray."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._supervisor is not None:
            await self._supervisor.stop()
        self._channel.send(WorkersStopped())
        await self._machines.stop()

    async def _end_everything(self) -> None:
        """The parent of this cluster is gone; its ranks end by themselves, or go on with the next parent."""
        folder = Path(self._begin.folder)
        if not self._begin.lock:
            await self._machines.stop()
            return
        kill_users(folder)  # Ray, too: its library may end this process at any time now
        shutil.rmtree(folder, ignore_errors=True)


class ParentLog(logging.Handler):
    """Sends log records to the parent, which writes the log."""

    def __init__(self, channel: MessageChannel) -> None:
        super().__init__()
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: encodable(str(getattr(record, name))) for name in FIELDS if getattr(record, name, None)}
        message = encodable(self.format(record))
        line = LogLine(name=encodable(record.name), level=record.levelno, message=message, fields=fields)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._channel.send, line)


async def run(end: socket.socket) -> int:
    """The exit code."""
    channel = await MessageChannel.over(end, SUPERVISOR_MESSAGES)
    begin = await channel.receive()
    if not isinstance(begin, Begin):
        return 1  # the parent ended before it sent anything
    logging.basicConfig(level=logging.WARNING, handlers=[ParentLog(channel)], force=True)
    logging.captureWarnings(True)
    logging.getLogger("baton").setLevel(logging.INFO)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent decides when to end
    try:
        return await SupervisorProcess(begin, channel).run()
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.sleep(0)  # log records have been sent
                await channel.close()


async def run_and_leave(end: socket.socket) -> None:
    """Ends the process immediately: cancelled tasks would end the workers, and Ray's threads may never end."""
    code = 1
    try:
        code = await run(end)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """`argv`: the inherited file descriptor of the channel to the parent."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(run_and_leave(socket.socket(fileno=int(sys.argv[1]))))
