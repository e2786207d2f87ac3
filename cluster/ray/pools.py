"""The workers of a deployment in the serving process: planned, supervised, announced. Ray's library is in a process of
its own (`driver_process`), which may end while workers keep running.

order ─▶ begin: plan, as the machines allow ─▶ Supervisor ─▶ RankLauncher ─▶ Places ═ calls ═▶ the driver: Ray
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cluster.config.cluster_config import ClusterConfig
from cluster.config.revised import revised
from cluster.discovery.members import Announcements, Publish
from cluster.process.reaper import Reaper, adopt_orphans
from cluster.process.scratch_dir import Scratch, kill_users
from cluster.ray.driver_messages import BeginDriver
from cluster.ray.driver_process import DriverProcess
from cluster.ray.hosts import ThisMachine
from cluster.ray.launcher import RankLauncher
from cluster.ray.machine_part import MachinePart
from cluster.ray.places import Places
from cluster.ray.ray_session import OURS, end_private_ray, short_folder
from cluster.supervision.health import WorkerCalls
from cluster.supervision.lifecycle import LifeState
from cluster.supervision.living import LivingFleet, LivingWorker
from cluster.supervision.start_progress import Bars
from cluster.supervision.supervisor import RunningWorker, SupervisedWorker, Supervisor
from cluster.supervision.worker_placement import (
    FIRST,
    NodeResources,
    WorkerPlan,
    check_cores,
    check_fits,
    joined,
    missing,
    plan,
    replan,
    shared_cpus,
    why_not_gpus,
)
from protos.errors import Unavailable
from protos.values import WorkerInfo, WorkerRole
from router.fleet.channels import Channels
from router.fleet_owner import Revision

log = logging.getLogger("baton.cluster")

Result = TypeVar("Result")

RAY_TITLE = b"ray::"  # of processes that Ray's raylet started
STOP_S = 40.0  # for the stop of all workers and of Ray
TICK_S = 1.0
NUM_STARTS = 8  # starts of workers; their median is the expected duration
MAX_ENDED = 1024  # exit statuses that no link has read


class Pools:
    """Call `prepare` at any time, then `start`, `ready`, `wait`. `stop` undoes everything, in any state. Workers get a
    `part` of this machine, or all of it. With `keep`, which records the fleet, workers outlive this process; `left`:
    what an earlier one has recorded."""

    def __init__(
        self,
        config: ClusterConfig,
        bars: Bars,
        part: MachinePart | None = None,
        *,
        revision: Revision = FIRST,
        keep: Callable[[LivingFleet], None] | None = None,
        left: LivingFleet | None = None,
    ) -> None:
        self._config, self._bars, self._revision = config, bars, revision
        self._keep, self._left = keep, left
        self._scratch = Scratch(short_folder(), None if keep is None else left.folder if left is not None else "")
        folder, lock, orphan_s = self._scratch.path, self._scratch.lock, config.supervision.orphan_timeout_s
        begin = BeginDriver(
            config=config.ray, folder=str(folder), lock=lock, orphan_s=orphan_s, was_up=left is not None, part=part
        )
        self._driver = DriverProcess(begin, config.supervision, came_up=self._keep_places, clean_up=self._end_ray)
        here = None if config.ray.address else ThisMachine(folder, lock, self._exit_status, contact_s=orphan_s)
        self._places = Places(self._driver, here, orphan_s)
        self._launcher = RankLauncher(config, self._places, self._note_processes)
        self._announcer = Announcements()
        self._control = WorkerCalls(Channels(config.peers))
        self._supervisor = Supervisor(
            launcher=self._launcher,
            announcer=self._announcer,
            control=self._control,
            config=config.supervision,
            first_incarnation=time.time_ns() // 1_000_000,
            watch=self._show,
        )
        self._living: dict[str, LivingWorker] = {}
        self._reaper = Reaper(self._reaped)
        self._statuses: dict[int, int] = {}  # of ranks that have ended
        self._starts_s: dict[str, float] = {}  # by worker, the latest last
        self._device = left.plans[0].device if left is not None and left.plans else config.worker.device
        self._tasks: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left_alone = False

    async def prepare(self) -> None:
        """Starts Ray, in seconds, and then workers. Raises Misconfigured, Unavailable."""
        adopt_orphans()
        if self._left is not None:
            await asyncio.to_thread(self._end_ray)  # of the earlier process
        self._tasks = [asyncio.create_task(work) for work in (self._tick(), self._announce_trouble())]
        self._begin_task(self._driver.run())
        if self._left is not None:
            await self._adopt(self._left)
            return
        address = self._config.ray.address
        started = self._bars.step(f"connecting to Ray at {address}" if address else "starting Ray")
        try:
            nodes = await self._or_over(self._driver.call("nodes", kind=tuple[NodeResources, ...]))
        finally:
            started()
        self._begin_task(self._supervisor.run(self._first_plans(nodes)))

    async def start(self, publish: Publish) -> None:
        await self._announcer.begin(publish)

    async def ready(self) -> None:
        """Returns when every worker serves in its role; raises the BatonError of one that never will."""
        await self._or_over(self._supervisor.ready())

    async def wait(self) -> None:
        """Runs until `stop`; raises the BatonError of a worker that will never start."""
        await asyncio.shield(self._over)

    @property
    def plans(self) -> Sequence[WorkerPlan]:
        return self._supervisor.plans

    async def begin(
        self,
        counts: Mapping[WorkerRole, int],
        flips: Mapping[str, WorkerRole] | None = None,
        *,
        revision: Revision | None = None,
        kept: Mapping[WorkerRole, int] | None = None,
    ) -> Awaitable[None]:
        """See `cluster.capacity.roll.FleetActuator`."""
        if not self._supervisor.runs:
            raise Unavailable("no worker has been planned yet: try again later")
        nodes = await self._driver.call("nodes", kind=tuple[NodeResources, ...], waits=False)
        to = self._revision if revision is None else revision
        before, config, others = self.plans, revised(self._config, to), dict(kept or {})
        device = self._device = before[0].device if before else self._device  # also of workers after a sleep
        pools, tp = config.pools.with_counts(counts), config.worker.tp
        if not config.ray.address:
            both = config.pools.with_counts({role: count + others.get(role, 0) for role, count in counts.items()})
            check_fits(both, nodes, tp=tp, device=device)
            if device == "cpu" and sum(both.counts().values()) > len(before):
                check_cores(both, nodes, tp=tp)
        plans = replan(
            before, pools, nodes, tp=tp, device=device, pool_resources=config.ray.pool_resources,
            span_nodes=config.ray.span_nodes, flips=flips, fleet=config.fleet, revision=to, others=others,
        )  # fmt: skip
        self._revision = to
        return asyncio.ensure_future(self._supervisor.resize(plans))

    def roles(self) -> Mapping[str, WorkerRole]:
        return {plan.worker_id: plan.role for plan in self.plans}

    def serving(self) -> Mapping[str, WorkerRole]:
        return {worker_id: info.role for worker_id, info in self._supervisor.serving().items()}

    def reports(self) -> Sequence[WorkerInfo]:
        return tuple(self._supervisor.serving().values())

    def start_s(self) -> float:
        return statistics.median(self._starts_s.values()) if self._starts_s else 0.0

    def waiting_for(self) -> Sequence[str]:
        leaving = {plan.worker_id: plan.role for plan in self._supervisor.leaving}
        return missing(self.roles(), {**leaving, **self.serving()})

    async def drain(self, grace_s: float) -> None:
        """Gives no worker new work. Returns when running requests have finished, or after `grace_s`."""
        infos = self.reports()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(self._control.drain(info.address) for info in infos))

    async def stop(self) -> None:
        """Ends the workers and Ray; if cancelled, it leaves that to `end`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._supervisor.stop()
                await self._driver.stop()

    async def leave(self) -> None:
        """Leaves the workers to the next process: `end` comes after it."""
        self._left_alone, self._launcher.polite_s = True, None
        self._announcer.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._driver.leave()

    async def end(self) -> None:
        """Must run last: it leaves no process of this cluster on the machine, unless `leave` was called."""
        if not self._left_alone:
            self._launcher.polite_s = 0.0
        stopping = asyncio.create_task(self._supervisor.stop())
        await asyncio.sleep(0)  # nothing is started again from now on
        for task in self._tasks:
            task.cancel()
        if not self._left_alone:
            kill_users(self._scratch.path)
        await asyncio.gather(stopping, *self._tasks, return_exceptions=True)
        if not self._over.cancel() and not self._over.cancelled():
            self._over.exception()  # was raised where it was awaited, if anywhere
        if not self._left_alone:
            self._record(ended=True)
            kill_users(self._scratch.path)
            self._reaper.kill_strays(RAY_TITLE)
            self._reaper.close()
            self._scratch.remove()

    # ------------------------------------------------------------------------------------------------------------------

    async def _adopt(self, left: LivingFleet) -> None:
        plans = {plan.worker_id: plan for plan in (*left.plans, *left.leaving)}
        running = {worker_id: RunningWorker(has_served=True) for worker_id in left.have_served}
        for living in left.living:
            self._living[living.worker_id] = living
            running[living.worker_id] = RunningWorker(
                has_served=living.worker_id in left.have_served, incarnation=living.incarnation, info=living.info,
                follow=partial(self._launcher.adopt, plans[living.worker_id], living),
            )  # fmt: skip
            if living.info is not None:
                await self._announcer.announce(living.worker_id, living.info.address)
        self._begin_task(self._supervisor.run(left.plans, running=running, leaving=left.leaving))

    def _first_plans(self, nodes: tuple[NodeResources, ...]) -> tuple[WorkerPlan, ...]:
        """Raises Misconfigured if the machines cannot hold them."""
        config = revised(self._config, self._revision)
        tp, device, is_private = config.worker.tp, config.worker.device, not config.ray.address
        if is_private:
            check_fits(config.pools, nodes, tp=tp, device=device)
        plans = plan(
            config.pools, nodes, tp=tp, device=device, pool_resources=config.ray.pool_resources,
            span_nodes=config.ray.span_nodes, fleet=config.fleet, revision=self._revision,
        )  # fmt: skip
        if device == "auto" and any(node.gpus for node in nodes) and plans[0].device == "cpu":
            there = joined(nodes) if config.ray.span_nodes else nodes
            log.warning("running on CPUs: %s", why_not_gpus(config.pools, there, tp=tp))
        if is_private and (shared := shared_cpus(plans, nodes)):
            log.warning("%s", shared)
        return plans

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        def note(ended: asyncio.Task[None]) -> None:
            if ended.cancelled() or self._over.done():
                return
            if (error := ended.exception()) is not None:
                self._over.set_exception(error)
            else:
                self._over.set_result(None)

        task = asyncio.create_task(work)
        task.add_done_callback(note)
        self._tasks.append(task)

    async def _or_over(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Raises the BatonError with which everything ended."""
        working = asyncio.ensure_future(work)
        try:
            both: list[asyncio.Future[Any]] = [working, self._over]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._over.result()
                raise Unavailable("the workers are being stopped")
            return working.result()
        finally:
            working.cancel()

    async def _keep_places(self) -> None:
        await self._places.keep((*self._supervisor.plans, *self._supervisor.leaving))

    def _end_ray(self) -> None:
        if not self._config.ray.address:
            end_private_ray(self._scratch.path)
            self._reaper.kill_strays(RAY_TITLE)
            shutil.rmtree(self._scratch.path / OURS, ignore_errors=True)

    # -- what is known of the workers ----------------------------------------------------------------------------------

    def _note_processes(self, living: LivingWorker) -> None:
        self._living[living.worker_id] = living
        for host, pid in zip(living.hosts, living.pids, strict=False):  # there are no ids yet, or all
            if not host:
                self._reaper.watch(pid)
        self._record()

    def _show(self, view: SupervisedWorker) -> None:
        living = self._living.get(view.worker_id)
        if living is not None:
            is_gone = view.life.state in (LifeState.WAITING, LifeState.FAILED_PERMANENTLY)
            if is_gone or living.incarnation < view.incarnation:
                del self._living[view.worker_id]
            elif living.info != view.info:
                self._living[view.worker_id] = replace(living, info=view.info)
        if view.life.start_s:
            self._starts_s.pop(view.worker_id, None)
            self._starts_s[view.worker_id] = view.life.start_s
            if len(self._starts_s) > NUM_STARTS:
                del self._starts_s[next(iter(self._starts_s))]
        self._bars.show(view)
        self._record()

    def _record(self, *, ended: bool = False) -> None:
        if self._keep is None or not self._supervisor.runs:
            return
        config, views = self._config, self._supervisor.views
        self._keep(LivingFleet(
            folder=self._scratch.path.name, ray_address=config.ray.address, peers=config.peers,
            worker=config.worker,
            plans=self._supervisor.plans, leaving=self._supervisor.leaving,
            living=() if ended else tuple(living for name, living in self._living.items() if name in views),
            have_served=tuple(name for name, view in views.items() if view.life.has_served),
        ))  # fmt: skip

    def _reaped(self, pid: int, status: int) -> None:
        self._statuses[pid] = status
        if len(self._statuses) > MAX_ENDED:
            del self._statuses[next(iter(self._statuses))]  # the oldest

    def _exit_status(self, pid: int) -> int | None:
        return self._statuses.pop(pid, None)

    async def _tick(self) -> None:
        while True:
            try:
                self._reaper.reap_strays()
                self._record()  # again, for a Redis that has lost its data
            except Exception:  # the next iteration tries again
                log.exception("ended processes could not be reaped")
            await asyncio.sleep(TICK_S)

    async def _announce_trouble(self) -> None:
        while True:
            changed = asyncio.ensure_future(self._driver.changed.wait())
            try:
                await self._announcer.set_degraded(self._driver.trouble)
            except Exception:  # the next iteration tries again
                log.exception("what is wrong could not be announced")
            await asyncio.wait([changed], timeout=TICK_S)
            changed.cancel()
