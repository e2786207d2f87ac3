"""Keeps the workers of the desired state running: starts them, announces those that serve, restarts those that died.

one task a worker:  launch ─▶ Loading: starting ─▶ Serving: announce ─┬─▶ died: wait, launch again
                                                                      ├─▶ drained by an operator: launch again
                                                                      ├─▶ failed permanently: everything ends
                                                                      └─▶ no longer desired: drain, end, withdraw
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
    """Runs one incarnation of a worker. Closing the stream, or an error that it raises, ends all processes of the
    worker."""

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
    """A worker for display. `loaded`: the share of its weights that has been read; `loading`: the same in words."""

    worker_id: str
    life: Life
    incarnation: int
    loaded: float = 0.0
    loading: str = ""
    info: WorkerInfo | None = None


class WorkerControl(Protocol):
    """Calls to the worker at an address. If it cannot be reached, `check_health` and `change_role` raise BatonError;
    `drain` and `retire` return."""

    async def check_health(self, address: str) -> None:
        """Also raises BatonError if the worker is unhealthy."""
        ...

    async def drain(self, address: str) -> None:
        """Returns when nothing runs there any more."""
        ...

    async def retire(self, address: str) -> None:
        """Keeps new requests away, and returns when all running ones have ended."""
        ...

    async def change_role(self, address: str, role: WorkerRole) -> None:
        """Returns when the worker has the role; if cancelled, another call decides. Raises BatonError if it refuses."""
        ...


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker from its first launch until its removal. `flips_to`: its next role."""

    plan: WorkerPlan
    view: SupervisedWorker
    keeping: asyncio.Task[None] = field(init=False)
    retiring: asyncio.Task[None] | None = None
    flipping: asyncio.Task[None] | None = None
    flips_to: WorkerRole | None = None
    is_draining: bool = False  # of a worker that retires or flips

    @property
    def info(self) -> WorkerInfo | None:
        return self.view.info

    @property
    def serves(self) -> bool:
        return self.view.life.state is LifeState.SERVING

    @property
    def fields(self) -> dict[str, str]:
        return {"worker": self.plan.worker_id}


async def _ended(over: asyncio.Future[None]) -> None:
    await asyncio.shield(over)


class Supervisor:
    """Owns the desired state: one plan for each worker. Lives on one event loop.

    `first_incarnation` must be greater than all earlier ones; the time in seconds is. `watch` is called with every
    change of a worker.
    """

    def __init__(
        self,
        *,
        launcher: Launcher,
        announcer: Announcer,
        control: WorkerControl,
        config: SupervisionConfig,
        first_incarnation: int,
        watch: Callable[[SupervisedWorker], None] = lambda view: None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._desired: dict[str, WorkerPlan] = {}
        self._initial: frozenset[str] = frozenset()
        self._launcher = launcher
        self._announcer = announcer
        self._control = control
        self._config = config
        self._incarnation = first_incarnation
        self._running: dict[str, RunningWorker] = {}
        self._watch = watch
        self._clock = clock or asyncio.get_running_loop().time
        self._sleep = sleep
        self._workers: dict[str, WorkerSlot] = {}
        self._changed = Changed()
        self._failures: dict[str, BatonError] = {}  # of workers that a resize has added
        self._over: asyncio.Future[None] | None = None
        self.num_faults = 0

    @property
    def views(self) -> Mapping[str, SupervisedWorker]:
        return {worker_id: slot.view for worker_id, slot in self._workers.items()}

    @property
    def runs(self) -> bool:
        return self._over is not None

    @property
    def plans(self) -> tuple[WorkerPlan, ...]:
        return tuple(self._desired.values())

    def run(
        self,
        plans: Sequence[WorkerPlan],
        *,
        running: Mapping[str, RunningWorker] | None = None,
        leaving: Sequence[WorkerPlan] = (),
    ) -> Coroutine[Any, Any, None]:
        """Begins at once. The result runs until `stop`, and raises the BatonError of a worker that will never start.
        `running` workers need no launch at first; those of `leaving`, which an earlier supervisor was about to end, are
        drained and ended."""
        self._desired = {plan.worker_id: plan for plan in plans}
        self._initial, self._running = frozenset(self._desired), dict(running or {})
        self._over = asyncio.get_running_loop().create_future()
        for plan in leaving:
            self._keep(plan)
        self._reconcile()
        return _ended(self._over)

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

    @property
    def leaving(self) -> tuple[WorkerPlan, ...]:
        """Plans of workers that are not desired and have not ended."""
        return tuple(slot.plan for worker_id, slot in self._workers.items() if worker_id not in self._desired)

    def serving(self) -> Mapping[str, WorkerInfo]:
        return {worker_id: slot.info for worker_id, slot in self._workers.items() if slot.serves and slot.info}

    async def stop(self) -> None:
        """Ends and withdraws all workers. Idempotent."""
        slots = self._workers.values()
        tasks = [task for slot in slots for task in (slot.flipping, slot.retiring, slot.keeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker_id in tuple(self.views):
            await self._announcer.withdraw(worker_id)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    # ------------------------------------------------------------------------------------------------------------------

    def _is_reached(self) -> bool:
        if any(slot.retiring or slot.flipping for slot in self._workers.values()):
            return False
        roles = {worker_id: info.role for worker_id, info in self.serving().items()}
        return roles == {worker_id: plan.role for worker_id, plan in self._desired.items()}

    def _reconcile(self) -> None:
        """Starts desired workers that are missing, retires workers that are not desired, and changes roles."""
        for worker_id, slot in self._workers.items():
            if worker_id not in self._desired and slot.retiring is None:
                slot.retiring = asyncio.create_task(self._retire(worker_id, slot), name=f"retire {worker_id}")
        for worker_id, plan in self._desired.items():
            if worker_id not in self._workers:
                self._keep(plan)
            self._reconcile_role(plan)

    def _reconcile_role(self, plan: WorkerPlan) -> None:
        """Begins to change the role of a serving worker. A change to an outdated role ends."""
        slot = self._workers[plan.worker_id]
        before, slot.plan = slot.flipping, plan
        if before is not None and slot.flips_to is not plan.role:
            before.cancel()
        elif before is not None or slot.info is None or slot.info.role is plan.role:
            return
        slot.flips_to = plan.role
        slot.flipping = asyncio.create_task(self._flip(plan, slot, after=before), name=f"flip {plan.worker_id}")

    async def _flip(self, plan: WorkerPlan, slot: WorkerSlot, after: asyncio.Task[None] | None) -> None:
        """Returns when the worker has the role or its process has ended: its successor starts with the role."""
        worker_id = plan.worker_id
        try:
            if after is not None:
                await asyncio.wait([after])
            await self._let_go(worker_id, slot)
            while slot.info is not None:
                try:
                    await self._control.change_role(slot.info.address, plan.role)
                except BatonError as error:
                    log.warning("worker %s keeps its role for now: %s", worker_id, error.message, extra=slot.fields)
                    await self._sleep(self._config.health_period_s)
                    continue
                if slot.info is not None:
                    self._show(slot, info=replace(slot.info, role=plan.role))
                log.info("worker %s is a %s worker now", worker_id, plan.role, extra=slot.fields)
                return
        finally:
            if slot.flipping is asyncio.current_task():
                slot.flipping, slot.flips_to, slot.is_draining = None, None, False
            self._changed.notify()

    def _keep(self, plan: WorkerPlan) -> None:
        worker_id, now = plan.worker_id, self._clock()
        running = self._running.pop(worker_id, RunningWorker(has_served=False))
        life = lifecycle.initial(now, has_served=running.has_served)
        if running.info is not None:
            life = lifecycle.opened(life, now)
        view = SupervisedWorker(worker_id=worker_id, life=life, incarnation=running.incarnation, info=running.info)
        slot = self._workers[worker_id] = WorkerSlot(plan, view)
        slot.keeping = asyncio.create_task(self._keep_alive(slot, running.follow), name=f"keep {worker_id}")

        def note(ended: asyncio.Task[None]) -> None:
            if ended.cancelled() or (error := ended.exception()) is None:
                return
            if isinstance(error, BatonError) and worker_id not in self._initial:
                log.error("worker %s will never start: %s", worker_id, error.message, extra=slot.fields)
                self._failures[worker_id] = error
                self._desired = {name: plan for name, plan in self._desired.items() if name != worker_id}
                self._reconcile()
            elif self._over is not None and not self._over.done():
                self._over.set_exception(error)

        slot.keeping.add_done_callback(note)

    async def _let_go(self, worker_id: str, slot: WorkerSlot) -> None:
        """Returns when another worker serves, so that requests continue while this one drains. Returns at once if none
        is about to serve, and after `grace_s` in any case, because the other one may need this worker's share of the
        machine."""

        def goes_on() -> bool:
            others = {name: other for name, other in self._workers.items() if other is not slot}
            serving = {name: other for name, other in others.items() if other.serves}
            if any(not other.is_draining for other in serving.values()):
                return True
            is_flipping = any(other.flipping for other in serving.values())
            return not is_flipping and not self._desired.keys() - {worker_id} - serving.keys()

        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.grace_s):
                while not goes_on():
                    await self._changed.wait()
        slot.is_draining = True

    async def _retire(self, worker_id: str, slot: WorkerSlot) -> None:
        if slot.flipping is not None:
            slot.flipping.cancel()
        if slot.info is not None:
            revision = slot.info.revision
            await self._let_go(worker_id, slot)
            if self._is_replaced(revision) and slot.info is not None:
                await self._while_kept(slot, self._control.retire(slot.info.address), self._config.roll_patience_s)
        if slot.info is not None:
            await self._while_kept(slot, self._control.drain(slot.info.address), self._config.grace_s)
        slot.keeping.cancel()
        await asyncio.gather(slot.keeping, return_exceptions=True)
        await self._launcher.release(worker_id)
        del self._workers[worker_id]
        self._initial -= {worker_id}
        await self._announcer.withdraw(worker_id)
        log.info("worker %s has been removed", worker_id, extra={"worker": worker_id})
        self._reconcile()  # it may be desired again
        self._changed.notify()

    async def _while_kept(self, slot: WorkerSlot, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Waits for the work, or until the worker has ended, for at most `timeout_s`."""
        working = asyncio.ensure_future(work)
        await asyncio.wait([working, slot.keeping], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()

    def _is_replaced(self, revision: str) -> bool:
        """Whether all desired workers have another revision: nothing can move to them."""
        desired = {plan.revision.name for plan in self._desired.values()}
        return bool(desired) and revision not in desired

    async def _keep_alive(
        self, slot: WorkerSlot, follow: Callable[[], AsyncGenerator[Event, None]] | None = None
    ) -> None:
        """Launches a worker again until it is retired. `follow`: the worker already runs."""
        worker_id, life = slot.plan.worker_id, slot.view.life
        while True:
            if follow is not None:
                events, follow = follow(), None
                self._show(slot)
            elif slot.retiring is not None:
                return
            else:
                slot.plan = self._desired.get(worker_id, slot.plan)
                self._incarnation += 1
                events = self._launcher.launch(slot.plan, self._incarnation)
                slot.view = SupervisedWorker(worker_id=worker_id, life=life, incarnation=self._incarnation)
                self._show(slot)
            if slot.info is None:
                await self._announcer.starting(worker_id, Successor(role=slot.plan.role))
            error = await self._live(slot, events)
            if slot.retiring is not None:
                return  # it was drained, and ended by itself
            if error is None:
                log.info("worker %s has ended: the next one takes its place", worker_id, extra=slot.fields)
                life = lifecycle.drained(slot.view.life, self._clock())
                continue
            life = lifecycle.failed(slot.view.life, error, self._clock(), self._config)
            self._show(slot, life=life, info=None, loaded=0.0)
            if life.state is LifeState.FAILED_PERMANENTLY:
                raise error
            await self._announcer.starting(worker_id, Successor(role=slot.plan.role))
            delay_s = life.due_s - self._clock()
            log.warning(
                "worker %s: %s; starting it again in %.2g s", worker_id, error.message, delay_s, extra=slot.fields
            )
            await self._sleep(delay_s)
            life = lifecycle.restarted(life, self._clock())

    async def _live(self, slot: WorkerSlot, events: AsyncGenerator[Event, None]) -> BatonError | None:
        """Runs one incarnation. Returns its failure, or None after a requested stop."""
        serves = asyncio.Event()
        if slot.info is not None:
            serves.set()
        living = asyncio.create_task(self._follow(slot, events, serves))
        beating = asyncio.create_task(self._watch_health(slot, serves))
        try:
            await asyncio.wait([living, beating], return_when=asyncio.FIRST_COMPLETED)
            return (living if living.done() else beating).result()
        finally:
            for task in (living, beating):
                task.cancel()
            await asyncio.wait([living, beating])

    async def _follow(
        self, slot: WorkerSlot, events: AsyncGenerator[Event, None], serves: asyncio.Event
    ) -> BatonError | None:
        """Records the worker's events. Returns its failure, or None if it served and then ended in order."""
        try:
            async with aclosing(events):
                async for event in events:
                    await self._apply(slot, event)
                    if isinstance(event, Serving):
                        serves.set()
        except BatonError as error:
            return error
        except Exception as error:  # an error of one worker must not end the others
            worker_id = slot.plan.worker_id
            log.exception("worker %s: it could not be launched: internal error", worker_id, extra=slot.fields)
            self.num_faults += 1
            return Internal(f"{type(error).__name__}: {error}")
        return None if slot.serves else WorkerLost("it ended by itself")

    async def _watch_health(self, slot: WorkerSlot, serves: asyncio.Event) -> BatonError:
        """Checks progress: a process that lives but makes none counts as dead. Begins when the worker serves."""
        misses = 0
        await serves.wait()
        while True:
            assert slot.info is not None, f"{slot.plan.worker_id} serves without an address"
            address = slot.info.address
            await self._sleep(self._config.health_period_s)
            try:
                await self._control.check_health(address)
                misses = 0
            except BatonError as error:
                misses += 1
                if misses >= self._config.max_failed_checks:
                    return WorkerLost(f"it is not well: {error.message}")

    async def _apply(self, slot: WorkerSlot, event: Event) -> None:
        worker_id = slot.plan.worker_id
        match event:
            case Loading(share=share):
                self._show(slot, loaded=share, loading=str(event))
                await self._announcer.starting(worker_id, Successor(role=slot.plan.role, loaded=share))
            case Serving(info=info):
                await self._announcer.announce(worker_id, info.address)
                life = slot.view.life if slot.serves else lifecycle.opened(slot.view.life, self._clock())
                self._show(slot, life=life, info=info, loaded=1.0)
                if slot.retiring is None and (desired := self._desired.get(worker_id)) is not None:
                    self._reconcile_role(desired)
            case Logged(level=level, message=message):
                log.log(level, "%s: %s", worker_id, message)
            case Ended():
                pass  # the stream ends with it

    def _show(self, slot: WorkerSlot, **changes: Any) -> None:
        slot.view = replace(slot.view, **changes)
        self._watch(slot.view)
        self._changed.notify()
