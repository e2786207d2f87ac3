"""Keeps the workers of the desired state running: starts them, announces those that serve, restarts those that died.

one task a worker:  launch ─▶ Loading: starting ─▶ Serving: announce ─┬─▶ died: wait, launch again
                                                                      ├─▶ drained by an operator: launch again
                                                                      ├─▶ failed permanently: everything ends
                                                                      └─▶ no longer desired: drain, end, withdraw
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config.cluster_config import SupervisionConfig
from cluster.discovery.members import Announcer
from cluster.supervision import lifecycle
from cluster.supervision.lifecycle import Life, LifeState
from cluster.supervision.rank import Ended, Event, Loading, Logged, Serving
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import BatonError, Internal, WorkerLost
from protos.event_loop import Changed
from protos.values import WorkerInfo, WorkerRole
from router.fleet.successors import Successor

log = logging.getLogger("baton.cluster")


class Launcher(Protocol):
    """Runs one incarnation of a worker. Closing the stream ends all its processes, and so does an error that it
    raises."""

    def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]: ...

    async def release(self, worker_id: str) -> None:
        """Releases the share of the machine that is kept for the worker's next incarnation. Never fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that an earlier supervisor launched. `follow` is like `Launcher.launch`, and yields the worker's present
    state first; `info`: set if it serves. Without `follow` its process is gone, and only `has_served` is known."""

    has_served: bool
    incarnation: int = 0
    info: WorkerInfo | None = None
    follow: Callable[[], AsyncGenerator[Event, None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedWorker:
    """A worker as people see it. `loaded`: the share of its weights that has been read, `loading` says it in words."""

    worker_id: str
    life: Life
    incarnation: int
    loaded: float = 0.0
    loading: str = ""
    info: WorkerInfo | None = None


class CheckHealth(Protocol):
    """Calls the worker at an address. Raises BatonError if it is unhealthy, or does not answer in time."""

    async def __call__(self, address: str) -> None: ...


class DrainWorker(Protocol):
    """Drains the worker at an address. Returns when nothing runs there any more, or it is gone."""

    async def __call__(self, address: str) -> None: ...


class RetireWorker(Protocol):
    """Keeps new requests from the worker at an address. Returns when those that had begun have ended, or it is gone."""

    async def __call__(self, address: str) -> None: ...


class ChangeRole(Protocol):
    """Gives the worker at an address another role. Returns when it has the role; if cancelled, another call decides.
    Raises BatonError if the worker cannot be reached, or refuses."""

    async def __call__(self, address: str, role: WorkerRole) -> None: ...


class Supervisor:
    """Owns the desired state: one plan for each worker. Lives on one event loop.

    `first_incarnation` must be greater than all earlier ones; the time in seconds is. `running` workers need no launch
    at first; those of `leaving`, which an earlier supervisor was about to end, are drained and ended. `watch` is called
    with every change of a worker.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        *,
        launcher: Launcher,
        announcer: Announcer,
        check_health: CheckHealth,
        drain: DrainWorker,
        retire: RetireWorker,
        change_role: ChangeRole,
        config: SupervisionConfig,
        first_incarnation: int,
        running: Mapping[str, RunningWorker] | None = None,
        leaving: Sequence[WorkerPlan] = (),
        watch: Callable[[SupervisedWorker], None] = lambda view: None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._desired = {plan.worker_id: plan for plan in plans}
        self._initial = frozenset(self._desired)
        self._launcher = launcher
        self._announcer = announcer
        self._check_health = check_health
        self._drain = drain
        self._retire_worker = retire
        self._change_role = change_role
        self._config = config
        self._incarnation = first_incarnation
        self._running = dict(running or {})
        self._leaving = leaving
        self._watch = watch
        self._clock = clock or asyncio.get_running_loop().time
        self._sleep = sleep
        self._views: dict[str, SupervisedWorker] = {}
        self._changed = Changed()
        self._keeping: dict[str, asyncio.Task[None]] = {}  # by worker id
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._flipping: dict[str, tuple[WorkerRole, asyncio.Task[None]]] = {}  # the role that a worker is about to get
        self._draining: set[str] = set()  # of those that retire or flip
        self._failures: dict[str, BatonError] = {}  # of workers that a resize has added
        self._over: asyncio.Future[None] | None = None
        self.num_faults = 0

    @property
    def views(self) -> Mapping[str, SupervisedWorker]:
        return self._views

    @property
    def plans(self) -> tuple[WorkerPlan, ...]:
        """The desired state."""
        return tuple(self._desired.values())

    async def run(self) -> None:
        """Runs until `stop`; raises the BatonError of a worker that will never start."""
        self._over = asyncio.get_running_loop().create_future()
        for plan in self._leaving:
            self._keep(plan)
        self._reconcile()
        await asyncio.shield(self._over)

    async def ready(self) -> None:
        """Returns when exactly the workers of the desired state serve, in their roles."""
        while not self._is_reached():
            await self._changed.wait()

    async def resize(self, plans: Sequence[WorkerPlan]) -> None:
        """Makes `plans` the desired state: starts new workers; drains missing ones for at most `grace_s`, then ends
        them. A running worker changes its role, and has the rest of its plan from its next incarnation on.

        Returns when that is done, or when a later call has changed the desired state. Raises the BatonError of a new
        worker that will never start, which is then no longer desired.
        """
        desired = self._desired = {plan.worker_id: plan for plan in plans}
        self._failures.clear()
        self._reconcile()
        self._changed.notify()  # earlier calls return
        while self._desired is desired and not self._failures and not self._is_reached():
            await self._changed.wait()
        for error in self._failures.values():
            raise error

    def addresses(self) -> Sequence[str]:
        """Addresses of the workers that serve now."""
        return [view.info.address for view in self._serving() if view.info is not None]

    async def stop(self) -> None:
        """Ends and withdraws all workers. Idempotent."""
        flipping = [task for _, task in self._flipping.values()]
        tasks = [*flipping, *self._retiring.values(), *self._keeping.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker_id in tuple(self._views):
            await self._announcer.withdraw(worker_id)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    # ------------------------------------------------------------------------------------------------------------------

    def _serving(self) -> list[SupervisedWorker]:
        return [view for view in self._views.values() if view.life.state is LifeState.SERVING]

    def _is_reached(self) -> bool:
        if self._retiring or self._flipping:
            return False
        serving = {view.worker_id: view.info.role for view in self._serving() if view.info is not None}
        return serving == {worker_id: plan.role for worker_id, plan in self._desired.items()}

    def _reconcile(self) -> None:
        """Starts desired workers that are missing, retires workers that are not desired, and changes roles."""
        surplus = [one for one in self._keeping if one not in self._desired and one not in self._retiring]
        for worker_id in surplus:
            self._retiring[worker_id] = asyncio.create_task(self._retire(worker_id), name=f"retire {worker_id}")
        for worker_id, plan in self._desired.items():
            if worker_id not in self._keeping:
                self._keep(plan)
            self._reconcile_role(plan)

    def _reconcile_role(self, plan: WorkerPlan) -> None:
        """Begins to change the role of a serving worker. A change to an outdated role ends."""
        worker_id, view = plan.worker_id, self._views.get(plan.worker_id)
        role, task = self._flipping.get(worker_id, (None, None))
        if task is not None and role is not plan.role:
            task.cancel()
        elif task is not None or view is None or view.info is None or view.info.role is plan.role:
            return
        flipping = asyncio.create_task(self._flip(plan, after=task), name=f"flip {worker_id}")
        self._flipping[worker_id] = (plan.role, flipping)

    async def _flip(self, plan: WorkerPlan, after: asyncio.Task[None] | None) -> None:
        """Until the worker has the role, or its process ends: its successor starts with the role."""
        worker_id, me = plan.worker_id, asyncio.current_task()
        try:
            if after is not None:
                await asyncio.wait([after])
            await self._let_go(worker_id)
            while (view := self._views.get(worker_id)) is not None and view.info is not None:
                try:
                    await self._change_role(view.info.address, plan.role)
                except BatonError as error:
                    log.warning("worker %s keeps its role for now: %s", worker_id, error.message, extra=_of(plan))
                    await self._sleep(self._config.health_period_s)
                    continue
                view = self._views.get(worker_id)
                if view is not None and view.info is not None:
                    self._show(replace(view, info=replace(view.info, role=plan.role)))
                log.info("worker %s is a %s worker now", worker_id, plan.role, extra=_of(plan))
                return
        finally:
            if self._flipping.get(worker_id, (None, None))[1] is me:
                del self._flipping[worker_id]
                self._draining.discard(worker_id)
            self._changed.notify()

    def _keep(self, plan: WorkerPlan) -> None:
        task = asyncio.create_task(self._keep_alive(plan), name=f"keep {plan.worker_id}")
        self._keeping[plan.worker_id] = task

        def note(ended: asyncio.Task[None]) -> None:
            if ended.cancelled() or (error := ended.exception()) is None:
                return
            if isinstance(error, BatonError) and plan.worker_id not in self._initial:
                log.error("worker %s will never start: %s", plan.worker_id, error.message, extra=_of(plan))
                self._failures[plan.worker_id] = error
                self._desired = {name: one for name, one in self._desired.items() if name != plan.worker_id}
                self._reconcile()
            elif self._over is not None and not self._over.done():
                self._over.set_exception(error)

        task.add_done_callback(note)

    async def _let_go(self, worker_id: str) -> None:
        """Returns when another worker serves, so that requests go on while this one drains; at once if none is about
        to, and after `grace_s` in any case: the other one may wait for this one's share of the machine."""

        def goes_on() -> bool:
            serving = {view.worker_id for view in self._serving()} - {worker_id}
            if serving - self._draining:
                return True
            return not (self._desired.keys() - {worker_id} - serving) | (serving & self._flipping.keys())

        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.grace_s):
                while not goes_on():
                    await self._changed.wait()
        self._draining.add(worker_id)

    async def _retire(self, worker_id: str) -> None:
        """Drains a worker, ends it, and removes its record."""
        if worker_id in self._flipping:
            self._flipping[worker_id][1].cancel()
        keeping, view = self._keeping[worker_id], self._views.get(worker_id)
        if view is not None and view.info is not None:
            await self._let_go(worker_id)
            if self._is_replaced(view.info.revision):
                await self._run_dry(view.info.address, keeping)
            view = self._views.get(worker_id)
        if view is not None and view.info is not None and not keeping.done():
            draining = asyncio.ensure_future(self._drain(view.info.address))
            await asyncio.wait([draining, keeping], timeout=self._config.grace_s, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await self._launcher.release(worker_id)
        self._views.pop(worker_id, None)
        del self._keeping[worker_id], self._retiring[worker_id]
        self._draining.discard(worker_id)
        self._initial -= {worker_id}
        await self._announcer.withdraw(worker_id)
        log.info("worker %s has been removed", worker_id, extra={"worker": worker_id})
        self._reconcile()  # it may be desired again
        self._changed.notify()

    def _is_replaced(self, revision: str) -> bool:
        """Whether all desired workers have another revision: nothing can move to them."""
        desired = {plan.revision.name for plan in self._desired.values()}
        return bool(desired) and revision not in desired

    async def _run_dry(self, address: str, keeping: asyncio.Task[None]) -> None:
        """Lets the requests of a replaced revision end."""
        retiring = asyncio.ensure_future(self._retire_worker(address))
        patience_s = self._config.roll_patience_s
        await asyncio.wait([retiring, keeping], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        retiring.cancel()

    async def _keep_alive(self, plan: WorkerPlan) -> None:
        """Launches a worker again and again, until it is retired."""
        running = self._running.pop(plan.worker_id, RunningWorker(has_served=False))
        life = lifecycle.initial(self._clock(), has_served=running.has_served)
        if running.info is not None:
            life = lifecycle.opened(life, self._clock())
        while True:
            if running.follow is not None:
                incarnation, info, events = running.incarnation, running.info, running.follow()
                running = RunningWorker(has_served=running.has_served)
            elif plan.worker_id in self._retiring:
                return
            else:
                plan = self._desired.get(plan.worker_id, plan)
                self._incarnation += 1
                incarnation, info = self._incarnation, None
                events = self._launcher.launch(plan, incarnation)
            self._show(SupervisedWorker(worker_id=plan.worker_id, life=life, incarnation=incarnation, info=info))
            if info is None:
                await self._announcer.starting(plan.worker_id, Successor(role=plan.role))
            error = await self._live(plan, events)
            if plan.worker_id in self._retiring:
                return  # it was drained, and ended by itself
            view = self._views[plan.worker_id]
            if error is None:
                log.info("worker %s has ended: the next one takes its place", plan.worker_id, extra=_of(plan))
                life = lifecycle.drained(view.life, self._clock())
                continue
            life = lifecycle.failed(view.life, error, self._clock(), self._config)
            self._show(replace(view, life=life, info=None, loaded=0.0))
            if life.state is LifeState.FAILED_PERMANENTLY:
                raise error
            await self._announcer.starting(plan.worker_id, Successor(role=plan.role))
            delay_s = life.due_s - self._clock()
            log.warning(
                "worker %s: %s; starting it again in %.2g s", plan.worker_id, error.message, delay_s, extra=_of(plan)
            )
            await self._sleep(delay_s)
            life = lifecycle.restarted(life, self._clock())

    async def _live(self, plan: WorkerPlan, events: AsyncGenerator[Event, None]) -> BatonError | None:
        """One incarnation, from its launch to its end. Returns its failure, or None if it was requested to stop."""
        serves = asyncio.Event()
        if self._views[plan.worker_id].info is not None:
            serves.set()
        living = asyncio.create_task(self._follow(plan, events, serves))
        beating = asyncio.create_task(self._watch_health(plan.worker_id, serves))
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
        """Records the worker's events. Returns its failure, or None if it served and then ended in order."""
        try:
            async with aclosing(events):
                async for event in events:
                    await self._apply(plan, event)
                    if isinstance(event, Serving):
                        serves.set()
        except BatonError as error:
            return error
        except Exception as error:  # an error of one worker must not end the others
            log.exception("worker %s: it could not be launched: internal error", plan.worker_id, extra=_of(plan))
            self.num_faults += 1
            return Internal(f"{type(error).__name__}: {error}")
        served = self._views[plan.worker_id].life.state is LifeState.SERVING
        return None if served else WorkerLost("it ended by itself")

    async def _watch_health(self, worker_id: str, serves: asyncio.Event) -> BatonError:
        """Checks progress: a process that lives but makes none counts as dead. Begins when the worker serves."""
        misses = 0
        await serves.wait()
        while True:
            info = self._views[worker_id].info
            assert info is not None, f"{worker_id} serves without an address"
            await self._sleep(self._config.health_period_s)
            try:
                await self._check_health(info.address)
                misses = 0
            except BatonError as error:
                misses += 1
                if misses >= self._config.max_failed_checks:
                    return WorkerLost(f"it is not well: {error.message}")

    async def _apply(self, plan: WorkerPlan, event: Event) -> None:
        worker_id = plan.worker_id
        view = self._views[worker_id]
        match event:
            case Loading(share=share):
                self._show(replace(view, loaded=share, loading=str(event)))
                await self._announcer.starting(worker_id, Successor(role=plan.role, loaded=share))
            case Serving(info=info):
                await self._announcer.announce(worker_id, info.address)
                serves = view.life.state is LifeState.SERVING
                life = view.life if serves else lifecycle.opened(view.life, self._clock())
                self._show(replace(view, life=life, info=info, loaded=1.0))
                if worker_id not in self._retiring and (desired := self._desired.get(worker_id)) is not None:
                    self._reconcile_role(desired)
            case Logged(level=level, message=message):
                log.log(level, "%s: %s", worker_id, message)
            case Ended():
                pass  # the stream ends with it

    def _show(self, view: SupervisedWorker) -> None:
        self._views[view.worker_id] = view
        self._watch(view)
        self._changed.notify()


def _of(plan: WorkerPlan) -> dict[str, str]:
    """Fields of a log record."""
    return {"worker": plan.worker_id}
