"""The workers of a deployment, as the serving process sees them. Their supervisor runs in a process of its own, which
this process starts, and restarts while workers keep running.

spawn the supervisor ─▶ Planned ─▶ Viewed, WorkerJoined ... ─▶ it has ended: spawn the next one, which adopts them
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.config.cluster_config import ClusterConfig
from cluster.discovery.members import ClusterAnnouncer, LateAnnouncer
from cluster.process.channel import MessageChannel, Ping, Pong, ProcessFailed
from cluster.process.life import live, spawn
from cluster.process.reaper import Reaper, adopt_orphans
from cluster.process.scratch_dir import Scratch, kill_users
from cluster.ray.machine_part import MachinePart
from cluster.ray.ray_session import OURS, end_private_ray, short_folder
from cluster.ray.start_times import StartTimes
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
)  # fmt: skip
from cluster.supervision.lifecycle import LifeState, delay_s
from cluster.supervision.living import LivingFleet, LivingWorker
from cluster.supervision.start_progress import Bars
from cluster.supervision.supervisor import SupervisedWorker
from cluster.supervision.worker_placement import FIRST, WorkerPlan, missing
from protos.errors import BatonError, Unavailable
from protos.event_loop import Changed
from protos.values import WorkerRole
from protos.wire import raised
from router.fleet_owner import Revision

log = logging.getLogger("baton.cluster")

PROGRAM = "from cluster.ray.supervisor_process import main; main()"
RAY_TITLE = b"ray::"  # of processes that Ray's raylet started
START_TRIES = 3  # of a Ray that never started
STOP_S = 40.0  # for the stop of all workers and of Ray
MAX_PAUSE_S = 5.0  # before a supervisor that keeps ending is started again
TICK_S = 1.0
PING_S = 2.0
DOUBT_UNANSWERED = 2
MAX_UNANSWERED = 15  # the supervisor's times are generous: no request waits for it, and importing Ray takes seconds
MAX_SAID_LINES = 20


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
        self._config = config
        self._keep, self._left = keep, left
        self._part = part
        self._revision = revision
        self._bars = bars
        self._scratch: Scratch | None = None
        self._announcer = LateAnnouncer()
        self._channel: MessageChannel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reaper = Reaper(self._reaped)
        self._views: dict[str, SupervisedWorker] = {}
        self._living: dict[str, LivingWorker] = {}
        self._have_served: set[str] = set()
        self._statuses: dict[int, int] = {}  # of ranks that ended while there was no supervisor
        self._steps: dict[str, Callable[[], None]] = {}
        self._error: BatonError | None = None
        self._away: tuple[str, float] | None = None  # why a lost worker may not be restarted, and since when
        self._changed = Changed()
        self._num_unanswered = 0
        self._has_begun = False
        self._drained = self._stopped = self._stopping = self._left_alone = False
        self._num_resizes = 0
        self._planned: int = 0  # the number of the latest Resize that the machines can hold
        self._resized: dict[int, Resized] = {}
        self._leaving: dict[str, WorkerPlan] = {}
        self._is_planned = False
        self._starts = StartTimes()
        self.plans: Sequence[WorkerPlan] = ()
        if left is not None:
            self._is_planned, self.plans = True, left.plans
            self._leaving = {plan.worker_id: plan for plan in left.leaving}
            self._living = {living.worker_id: living for living in left.living}
            self._announcer.addresses = {one.worker_id: one.info.address for one in left.living if one.info is not None}
            self._have_served = set(left.have_served)

    async def prepare(self) -> None:
        """Starts the supervisor, and with it Ray, in seconds. Raises Misconfigured, Unavailable."""
        shared = None if self._keep is None else self._left.folder if self._left is not None else ""
        self._scratch = Scratch(short_folder(), shared)
        adopt_orphans()
        if self._left is not None:
            await asyncio.to_thread(self._end_ray, self._scratch.path)  # of the earlier process
        self._tasks = [asyncio.create_task(self._keep_alive(), name="supervisor"), asyncio.create_task(self._tick())]
        await self._until(lambda: self._is_planned)

    async def start(self, announcer: ClusterAnnouncer) -> None:
        """From now on workers are announced."""
        await self._announcer.begin(announcer)

    async def ready(self) -> None:
        """Returns when every worker serves in its role; raises the BatonError of one that never will."""
        await self._until(lambda: not self.waiting_for())

    async def wait(self) -> None:
        """Runs until `stop`; raises the BatonError of a worker that will never start."""
        assert self._tasks, "prepare() comes first"
        await asyncio.shield(self._tasks[0])

    @property
    def trouble(self) -> str:
        """Why a lost worker may not be restarted at present; "" if it would be."""
        if self._away is None:
            if self._num_unanswered <= DOUBT_UNANSWERED or self._channel is None:
                return ""
            silent_s = (self._num_unanswered - 1) * PING_S
            return (
                f"the supervisor has not answered for {silent_s:.0f} s: workers keep serving; a lost worker is not "
                "restarted"
            )
        reason, since_s = self._away
        kept = "a lost worker is started again where it was" if not self._config.ray.address else (
            "a lost worker is not started again before it is back"
        )  # fmt: skip
        return f"{reason} (for {time.monotonic() - since_s:.0f} s): workers keep serving; {kept}"

    async def begin(
        self,
        counts: Mapping[WorkerRole, int],
        flips: Mapping[str, WorkerRole] | None = None,
        *,
        revision: Revision | None = None,
        kept: Mapping[WorkerRole, int] | None = None,
    ) -> Awaitable[None]:
        """Makes these the desired numbers of workers, of the latest `revision` that was given, and `kept` of others;
        those in `flips` change their roles. Raises Misconfigured if the machines cannot hold them, and Unavailable
        without a supervisor or Ray.

        The result returns when that is reached, or a later call has replaced it, also by a later supervisor. It raises
        the BatonError of a new worker that will never start."""
        channel = self._channel
        if channel is None or not self._is_planned:
            raise Unavailable("there is no supervisor at present: try again later")
        self._num_resizes = number = self._num_resizes + 1
        to = self._revision if revision is None else revision
        wanted = Resize(number=number, counts=dict(counts), flips=dict(flips or {}), revision=to, kept=dict(kept or {}))
        channel.send(wanted)
        await self._until(
            lambda: self._planned >= number or number in self._resized or self._channel is not channel
        )  # fmt: skip
        if self._planned < number and number not in self._resized:
            raise Unavailable("the supervisor was lost before it had planned the new size: try again later")
        if self._planned < number and (error := self._resized.pop(number).error) is not None:
            raise raised(error)
        self._revision = to
        return self._reached(number, channel)

    async def _reached(self, number: int, channel: MessageChannel) -> None:
        def is_over() -> bool:
            lost = self._channel is not channel
            return number in self._resized or (lost and (self._num_resizes > number or not self.waiting_for()))

        await self._until(is_over)
        resized = self._resized.pop(number, None)
        if resized is not None and resized.error is not None:
            raise raised(resized.error)

    def roles(self) -> Mapping[str, WorkerRole]:
        """The desired workers' roles by id."""
        return {plan.worker_id: plan.role for plan in self.plans}

    def serving(self) -> Mapping[str, WorkerRole]:
        """The present roles of the workers that serve, by id."""
        return {view.worker_id: view.info.role for view in self._serving() if view.info is not None}

    def start_s(self) -> float:
        """The median seconds of the latest starts of workers; 0 before the first."""
        return self._starts.median_s

    def waiting_for(self) -> Sequence[str]:
        """A phrase for each worker that keeps the desired state from being reached."""
        serving = self.serving()
        ending = {plan.worker_id: plan.role for plan in self._leaving.values()}
        return missing(self.roles(), {**ending, **serving})

    async def drain(self, grace_s: float) -> None:
        """Gives no worker new work. Returns when running requests have finished, or after `grace_s`."""
        if self._channel is None or not self._views:
            return
        self._drained = False
        self._channel.send(Drain(grace_s=grace_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s + 1.0):
                await self._until(lambda: self._drained or self._channel is None)

    async def stop(self) -> None:
        """Ends the workers and Ray; if cancelled, it leaves that to `end`."""
        self._stopping = True
        if self._channel is not None:
            self._channel.send(StopWorkers())
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.wait(self._tasks[:1])

    async def leave(self) -> None:
        """Ends the supervisor, and leaves the workers to the next process: `end` comes after it."""
        self._stopping = self._left_alone = True
        if self._channel is not None:
            await self._channel.close()
            await asyncio.wait(self._tasks[:1], timeout=STOP_S)

    async def end(self) -> None:
        """Must run last: it leaves no process of this cluster on the machine, unless `leave` was called."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._scratch is not None and not self._left_alone:
            self._living.clear()
            self._record()
            kill_users(self._scratch.path)
            self._reaper.kill_strays(RAY_TITLE)
            self._reaper.close()
            self._scratch.remove()
            self._scratch = None

    # -- the supervisor ------------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        num_failures = 0
        while True:
            begun_s = time.monotonic()
            reason = await self._live()
            if self._stopping:
                return
            if self._error is not None:
                raise self._error
            supervision = self._config.supervision
            num_failures = 1 if time.monotonic() - begun_s > supervision.backoff_reset_s else num_failures + 1
            if not self._is_planned and num_failures >= START_TRIES:
                raise Unavailable(f"{reason}; tried {START_TRIES} times")
            pause_s = min(MAX_PAUSE_S, delay_s(num_failures, supervision)) if num_failures > 1 else 0.0
            what = "the supervisor is started again, and goes on with the workers that live"
            if not self._is_planned:
                what = f"this is tried again ({num_failures + 1} of {START_TRIES})"
            log.warning("%s: %s%s", reason, what, f" in {pause_s:.2g} s" if pause_s else "")
            await asyncio.sleep(pause_s)

    async def _live(self) -> str:
        """One life of the supervisor's process. Returns why it ended."""
        assert self._scratch is not None
        folder, stderr = self._scratch.path, self._scratch.path / "supervisor.err"
        try:
            process, ours = await spawn(PROGRAM, stderr)
        except OSError as error:  # too little memory, or too many processes or open files at the moment
            reason = f"the supervisor could not be started: {error}"
            self._note_away(reason)
            await self._announce_trouble()
            return reason
        channel = await MessageChannel.over(ours, SUPERVISOR_MESSAGES)
        channel.send(
            Begin(
                config=self._config, folder=str(folder), lock=self._scratch.lock, plans=tuple(self.plans),
                is_planned=self._is_planned, revision=self._revision,
                leaving=tuple(self._leaving.values()), living=tuple(self._living.values()),
                have_served=tuple(self._have_served), part=self._part,
            )
        )  # fmt: skip
        for pid, status in self._statuses.items():
            channel.send(ProcessEnded(pid=pid, status=status))
        self._statuses.clear()
        self._channel, self._num_unanswered, self._has_begun, before = channel, 0, False, self._away
        try:
            code = await live(process, self._follow(channel), self._watch_answers(channel))
        finally:
            self._channel = None
            await channel.close()
            self._changed.notify()
        reason = self._lost(code, stderr, before)
        await self._announce_trouble()
        await asyncio.to_thread(self._end_ray, folder)
        return reason

    def _end_ray(self, folder: Path) -> None:
        if not self._config.ray.address:
            end_private_ray(folder)
            self._reaper.kill_strays(RAY_TITLE)
            shutil.rmtree(folder / OURS, ignore_errors=True)

    def _lost(self, code: int, stderr: Path, before: tuple[str, float] | None) -> str:
        """Records that there is no supervisor, and returns why."""
        if self._away is not None and self._away is not before:
            return self._away[0]  # the supervisor has sent the reason
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._num_unanswered >= MAX_UNANSWERED:
            how = f"killed: it had not answered for {MAX_UNANSWERED * PING_S:g} s"
        elif code not in (0, -9) and (lines := stderr.read_text(errors="replace").strip().splitlines()):
            log.warning("the last lines of the supervisor's stderr:\n%s", "\n".join(lines[-MAX_SAID_LINES:]))
        reason = f"the supervisor was {how}" if code < 0 else f"the supervisor {how}"
        self._note_away(reason)
        return reason

    def _note_away(self, reason: str) -> None:
        if self._is_planned and not self._stopping:
            self._away = (reason, self._away[1] if self._away is not None else time.monotonic())

    async def _watch_answers(self, channel: MessageChannel) -> None:
        """Returns when the supervisor has started and then stopped answering pings: its event loop hangs."""
        while self._num_unanswered < MAX_UNANSWERED:
            await asyncio.sleep(PING_S)
            if self._has_begun:
                self._num_unanswered += 1
                channel.send(Ping())

    async def _follow(self, channel: MessageChannel) -> None:
        while (message := await channel.receive()) is not None:
            self._has_begun = True
            try:
                await self._handle(message)
            except Exception:  # the supervisor would block on a full socket, seem to hang, and be killed
                log.exception("a message of the supervisor could not be handled: %s", type(message).__name__)
            self._record()
            self._changed.notify()

    def _record(self) -> None:
        if self._keep is not None and self._scratch is not None:
            config = self._config
            self._keep(LivingFleet(
                folder=self._scratch.path.name, ray_address=config.ray.address, peers=config.peers,
                worker=config.worker,
                plans=tuple(self.plans), leaving=tuple(self._leaving.values()),
                living=tuple(self._living.values()), have_served=tuple(self._have_served),
            ))  # fmt: skip

    async def _handle(self, message: object) -> None:
        match message:
            case LogLine(name=name, level=level, message=line, fields=fields):
                logging.getLogger(name).log(level, "%s", line, extra=fields)
            case StartupStep(what=what, is_over=True):
                self._steps.pop(what, lambda: None)()
            case StartupStep(what=what):
                if not self._is_planned:
                    self._steps[what] = self._bars.step(what)
            case Planned(plans=plans, number=number):
                self._planned, self._is_planned = max(self._planned, number), True
                known, desired = (*self._leaving.values(), *self.plans), {plan.worker_id for plan in plans}
                there = self._views.keys() - desired
                self.plans, self._leaving = plans, {one.worker_id: one for one in known if one.worker_id in there}
            case WorkerRecorded(living=living):
                self._living[living.worker_id] = living
                for host, pid in zip(living.hosts, living.pids, strict=False):  # there are no ids yet, or all
                    if not host:
                        self._reaper.watch(pid)
            case Viewed(view=view):
                self._view(view)
            case RayAway(reason=reason):
                self._note_ray(reason)
                await self._announce_trouble()
            case ProcessFailed(error=error):
                self._error = raised(error)
            case Pong():
                self._num_unanswered = 0
            case Drained():
                self._drained = True
            case Resized(number=number):
                self._resized[number] = message
            case _:
                await self._announce(message)

    async def _announce(self, message: object) -> None:
        match message:
            case WorkerStarting(worker_id=worker_id, successor=successor):
                await self._announcer.starting(worker_id, successor)
            case WorkerJoined(worker_id=worker_id, address=address):
                await self._announcer.announce(worker_id, address)
            case WorkerLeft(worker_id=worker_id):
                for known in (self._views, self._living, self._leaving):
                    known.pop(worker_id, None)
                self._have_served.discard(worker_id)
                await self._announcer.withdraw(worker_id)
            case WorkersStopped():
                self._stopped = True

    def _view(self, view: SupervisedWorker) -> None:
        worker_id, living = view.worker_id, self._living.get(view.worker_id)
        is_gone = view.life.state in (LifeState.WAITING, LifeState.FAILED_PERMANENTLY)
        if living is not None and (is_gone or living.incarnation < view.incarnation):
            del self._living[worker_id]
        if view.life.state is LifeState.SERVING:
            self._have_served.add(worker_id)
        self._starts.note(view, time.monotonic())
        known = self._views.get(worker_id)
        self._views[worker_id] = view
        if known is None or (known.life.state, known.incarnation, known.loaded) != (
            view.life.state, view.incarnation, view.loaded,
        ):  # fmt: skip
            self._bars.show(view)

    def _note_ray(self, reason: str) -> None:
        if not self._is_planned:
            self._away = (reason, time.monotonic()) if reason else None
            return
        if not reason and self._away is not None:
            log.info("Ray is available, and every worker has its place in it")
            self._away = None
        elif reason and (self._away is None or self._away[0] != reason):
            self._away = (reason, self._away[1] if self._away is not None else time.monotonic())
            log.warning("%s", self.trouble)

    def _reaped(self, pid: int, status: int) -> None:
        if self._channel is not None:
            self._channel.send(ProcessEnded(pid=pid, status=status))
        else:
            self._statuses[pid] = status

    # ------------------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            try:
                self._reaper.reap_strays()
                self._record()  # again, for a Redis that has lost it
                await self._announce_trouble()
            except Exception:  # the next iteration tries again
                log.exception("ended processes could not be reaped, or what is wrong could not be announced")
            await asyncio.sleep(TICK_S)

    async def _announce_trouble(self) -> None:
        await self._announcer.set_degraded(self.trouble if self._is_planned else "")

    def _serving(self) -> list[SupervisedWorker]:
        return [view for view in self._views.values() if view.life.state is LifeState.SERVING]

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Raises the BatonError with which everything ended."""
        while not holds():
            turn = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([turn, self._tasks[0]], return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
            if self._tasks[0].done():
                self._tasks[0].result()
                return
