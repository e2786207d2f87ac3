"""Keeps every worker of a plan alive: starts them all at once, announces who serves, starts again who died.

tend (one task a worker):  launch ─▶ Loading: starting ─▶ Serving: announce ─▶ ... ─▶ died: wait, launch again
                                                                                   ├─▶ drained, and left: launch again
                                                                                   └─▶ hopeless: everything ends
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config.config import SupervisionConfig
from cluster.discovery.base import Announcer
from cluster.supervision import lifecycle
from cluster.supervision.lifecycle import Life, LifeState
from cluster.supervision.placement import WorkerPlan
from cluster.supervision.rank import Ended, Event, Loading, Logged, Serving
from protos.errors import BatonError, Internal, WorkerLost
from protos.event_loop import Changed
from protos.values import WorkerInfo
from router.fleet.successors import Successor

log = logging.getLogger("baton.cluster")


class Launcher(Protocol):
    """Runs one incarnation of a worker. Closing the stream ends all its processes; so does an error it raises."""

    def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A worker that an earlier supervisor has launched. `follow` is as `Launcher.launch` of it, and sends its present
    state first; `info`: it serves. Without `follow` its process is gone, and only `has_served` is known."""

    has_served: bool
    incarnation: int = 0
    info: WorkerInfo | None = None
    follow: Callable[[], AsyncGenerator[Event, None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker as people are shown it. `loaded` is the share of its weights that is read."""

    worker_id: str
    life: Life
    incarnation: int
    loaded: float = 0.0
    info: WorkerInfo | None = None


class CheckHealth(Protocol):
    """Asks the worker at an address. Raises BatonError when it is not well, or does not say in time."""

    async def __call__(self, address: str) -> None: ...


class Supervisor:
    """Lives on one event loop. `first_incarnation` must be greater than all that came before: the time will do.

    `watch` is called with every change of a worker; `running` are those that need no launch at first.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        *,
        launcher: Launcher,
        announcer: Announcer,
        check_health: CheckHealth,
        config: SupervisionConfig,
        first_incarnation: int,
        running: Mapping[str, Running] | None = None,
        watch: Callable[[WorkerView], None] = lambda view: None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._plans = plans
        self._launcher = launcher
        self._announcer = announcer
        self._check_health = check_health
        self._config = config
        self._incarnation = first_incarnation
        self._running = running or {}
        self._watch = watch
        self._clock = clock or asyncio.get_running_loop().time
        self._sleep = sleep
        self._views: dict[str, WorkerView] = {}
        self._changed = Changed()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_faults = 0

    @property
    def views(self) -> Mapping[str, WorkerView]:
        return self._views

    async def run(self) -> None:
        """Until `stop`; raises the BatonError of a worker that will never start."""
        self._tasks = [asyncio.create_task(self._tend(plan), name=f"tend {plan.worker_id}") for plan in self._plans]
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def ready(self) -> None:
        """Returns when every worker serves."""
        while len(self._serving()) < len(self._plans):
            await self._changed.wait()

    def addresses(self) -> Sequence[str]:
        """Of the workers that serve now."""
        return [view.info.address for view in self._serving() if view.info is not None]

    async def stop(self) -> None:
        """Ends all workers, and withdraws them. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker_id in tuple(self._views):
            await self._announcer.withdraw(worker_id)

    # ------------------------------------------------------------------------------------------------------------------

    def _serving(self) -> list[WorkerView]:
        return [view for view in self._views.values() if view.life.state is LifeState.SERVING]

    async def _tend(self, plan: WorkerPlan) -> None:
        running = self._running.get(plan.worker_id, Running(has_served=False))
        life = lifecycle.born(self._clock(), has_served=running.has_served)
        if running.info is not None:
            life = lifecycle.opened(life, self._clock())
        while True:
            if running.follow is not None:
                incarnation, info, events = running.incarnation, running.info, running.follow()
                running = Running(has_served=running.has_served)
            else:
                self._incarnation += 1
                incarnation, info = self._incarnation, None
                events = self._launcher.launch(plan, incarnation)
            self._show(WorkerView(worker_id=plan.worker_id, life=life, incarnation=incarnation, info=info))
            if info is None:
                await self._announcer.starting(plan.worker_id, Successor(role=plan.role))
            error = await self._live(plan, events)
            view = self._views[plan.worker_id]
            if error is None:
                log.info("worker %s has left: the next one takes its place", plan.worker_id, extra=_of(plan))
                life = lifecycle.left(view.life, self._clock())
                continue
            life = lifecycle.failed(view.life, error, self._clock(), self._config)
            self._show(replace(view, life=life, info=None, loaded=0.0))
            if life.state is LifeState.HOPELESS:
                raise error
            await self._announcer.starting(plan.worker_id, Successor(role=plan.role))
            delay_s = life.due_s - self._clock()
            log.warning(
                "worker %s: %s; starting it again in %.2g s", plan.worker_id, error.message, delay_s, extra=_of(plan)
            )
            await self._sleep(delay_s)
            life = lifecycle.restarted(life, self._clock())

    async def _live(self, plan: WorkerPlan, events: AsyncGenerator[Event, None]) -> BatonError | None:
        """One incarnation, from its launch to its end; what it ended with, None if it was told to leave."""
        serves = asyncio.Event()
        if self._views[plan.worker_id].info is not None:
            serves.set()
        living = asyncio.create_task(self._follow(plan, events, serves))
        beating = asyncio.create_task(self._beat(plan.worker_id, serves))
        try:
            await asyncio.wait([living, beating], return_when=asyncio.FIRST_COMPLETED)
            return (living if living.done() else beating).result()
        finally:
            for task in (living, beating):
                task.cancel()
            await asyncio.wait([living, beating])

    async def _follow(
        self, plan: WorkerPlan, events: AsyncGenerator[Event, None], serves: asyncio.Event
    ) -> BatonError | None:
        """Notes what the worker tells; what it ended with, None if it served and then ended in order."""
        try:
            async with aclosing(events):
                async for event in events:
                    await self._note(plan, event)
                    if isinstance(event, Serving):
                        serves.set()
        except BatonError as error:
            return error
        except Exception as error:  # one worker's trouble must not end the others
            log.exception(
                "worker %s: it could not be launched for a reason of our own", plan.worker_id, extra=_of(plan)
            )
            self.num_faults += 1
            return Internal(f"{type(error).__name__}: {error}")
        served = self._views[plan.worker_id].life.state is LifeState.SERVING
        return None if served else WorkerLost("it ended by itself")

    async def _beat(self, worker_id: str, serves: asyncio.Event) -> BatonError:
        """Health means progress: a process that is there and gets nowhere is dead. Begins when the worker serves."""
        misses = 0
        await serves.wait()
        while True:
            info = self._views[worker_id].info
            assert info is not None, f"{worker_id} serves and nobody knows where"
            await self._sleep(self._config.health_period_s)
            try:
                await self._check_health(info.address)
                misses = 0
            except BatonError as error:
                misses += 1
                if misses >= self._config.max_failed_checks:
                    return WorkerLost(f"it is not well: {error.message}")

    async def _note(self, plan: WorkerPlan, event: Event) -> None:
        worker_id = plan.worker_id
        view = self._views[worker_id]
        match event:
            case Loading(share=share):
                self._show(replace(view, loaded=share))
                await self._announcer.starting(worker_id, Successor(role=plan.role, loaded=share))
            case Serving(info=info):
                await self._announcer.announce(worker_id, info.address)
                serves = view.life.state is LifeState.SERVING
                life = view.life if serves else lifecycle.opened(view.life, self._clock())
                self._show(replace(view, life=life, info=info, loaded=1.0))
            case Logged(level=level, message=message):
                log.log(level, "%s: %s", worker_id, message)
            case Ended():
                pass  # the stream ends with it

    def _show(self, view: WorkerView) -> None:
        self._views[view.worker_id] = view
        self._watch(view)
        self._changed.notify()


def _of(plan: WorkerPlan) -> dict[str, str]:
    """Fields of a record of the log."""
    return {"worker": plan.worker_id}
