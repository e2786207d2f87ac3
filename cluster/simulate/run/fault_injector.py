"""Applies faults to a deployment, and ends them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cluster.simulate.node.simulated_worker import SimulatedWorker
from cluster.simulate.run.clients import Clients
from cluster.simulate.run.deployment import SimulatedDeployment
from cluster.simulate.run.simulation_config import SimulationConfig
from cluster.simulate.world.faults import OF_EVENTS, OF_STORES, OF_WORKERS, Fault, Kind, targets_of
from cluster.simulate.world.simulated_lanes import STALL_S
from protos.errors import Misconfigured
from protos.hints import listed
from protos.values import KVEvents, StepMessage

LATEST_S = 60.0
TOO_LATE = "it begins after the load was over"
NO_TARGET = "its target did not exist"
PAUSED = "it was paused already"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """`passed_over`: the target did not exist at the time, as `why` says."""

    at_s: float
    kind: Kind
    target: str
    what: str
    passed_over: bool
    why: str


def check(faults: Sequence[Fault], config: SimulationConfig) -> None:
    """Raises Misconfigured for a target that cannot exist."""
    workers = sorted(config.pools.worker_ids())
    for fault in faults:
        possible = targets_of(fault.kind, workers, num_gateways=config.num_gateways, with_store=config.shared_index)
        if fault.target not in possible:
            there = f"choose one of {listed(possible)}" if possible else "there is none"
            there += "; settings.index = 'redis://any' makes one" if fault.kind in OF_STORES and not possible else ""
            raise Misconfigured(
                f"faults.schedule: {fault}: {fault.kind} has no target {fault.target}: {there}",
                param="faults.schedule",
            )


class Trouble:
    """A fault is passed over if its worker does not exist, or if it would begin more than `LATEST_S` after the load is
    `over`. `happened`: seconds since `run`."""

    def __init__(self, deployment: SimulatedDeployment, clients: Clients, *, seed: int) -> None:
        self._deployment = deployment
        self._clients = clients
        self.happened: list[Happened] = []
        self._start_s = 0.0
        self._over = asyncio.Event()
        self._over_s = math.inf
        self._rng = random.Random(f"{seed} trouble")
        self._loop = asyncio.get_running_loop()

    async def run(self, faults: Sequence[Fault]) -> None:
        self._start_s = self._loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                if await self._until(self._start_s + fault.at_s):
                    group.create_task(self._happen(fault), name=f"fault {fault}")
                else:
                    self._pass_over(fault, fault.at_s, TOO_LATE)

    def over(self) -> None:
        self._over_s = self._loop.time()
        self._over.set()

    async def _until(self, due_s: float) -> bool:
        """Waits until a fault is due, and until leaping workers have published all earlier messages: otherwise the
        fault could not lose them. False if it would come too late."""
        ahead_s = self._deployment.network.wire.delay_s + 1e-9
        if due_s - ahead_s > self._loop.time() + LATEST_S:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s - ahead_s):
                    await self._over.wait()
        if due_s > self._over_s + LATEST_S:
            return False
        await asyncio.sleep(max(0.0, due_s - ahead_s - self._loop.time()))
        self._deployment.end_leaps()
        await asyncio.sleep(max(0.0, due_s - self._loop.time()))
        return True

    async def _while_it_lasts(self, fault: Fault) -> None:
        """Ends a long fault soon after the load."""
        if fault.duration_s <= LATEST_S:
            return await asyncio.sleep(fault.duration_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(fault.duration_s):
                await self._over.wait()
                await asyncio.sleep(LATEST_S)

    def _why_not(self, fault: Fault) -> str:
        """Returns why the fault has no target, or ""."""
        workers = self._deployment.workers
        if fault.kind is Kind.LANE_CUT:
            return "" if all(worker_id in workers for worker_id in fault.target.split(">")) else NO_TARGET
        if fault.kind not in (*OF_WORKERS, *OF_EVENTS):
            return ""
        worker = workers.get(fault.target)
        if worker is None or not worker.alive:
            return NO_TARGET
        return PAUSED if fault.kind is Kind.PAUSE and worker.frozen else ""

    async def _happen(self, fault: Fault) -> None:
        at_s = self._loop.time() - self._start_s
        if why := self._why_not(fault):
            return self._pass_over(fault, at_s, why)
        self._note(fault, at_s)
        self._deployment.event_log.note("fault", fault.target, what=fault.kind)
        match fault.kind:
            case Kind.GATEWAY_RESTART:
                await self._deployment.restart_gateway(int(fault.target))
            case Kind.INDEX_LOST:
                self._deployment.clear_index(int(fault.target))
            case Kind.STORE_AWAY | Kind.STORE_LOST:
                await self._store(fault)
            case Kind.ABORTS:
                self._abort(fault.amount)
            case Kind.LANE_STALL | Kind.LANE_CUT | Kind.LANE_SLOW:
                await self._lane(fault, *fault.target.split(">"))
            case _:
                await self._worker(fault, self._deployment.workers[fault.target])

    def _pass_over(self, fault: Fault, at_s: float, why: str) -> None:
        self._note(fault, at_s, why=why)
        self._deployment.event_log.note("fault passed over", fault.target, what=fault.kind)

    def _note(self, fault: Fault, at_s: float, *, why: str = "") -> None:
        self.happened.append(
            Happened(at_s=at_s, kind=fault.kind, target=fault.target, what=fault.what, passed_over=bool(why), why=why)
        )

    async def _worker(self, fault: Fault, worker: SimulatedWorker) -> None:
        match fault.kind:
            case Kind.KILL:
                worker.kill()
            case Kind.RESET:
                worker.reset()
            case Kind.DRAIN:
                await self._deployment.drain(worker)
            case Kind.CLOCK_SKEW:
                worker.jump(fault.amount)
            case Kind.PAUSE:
                worker.freeze()
                await self._while_it_lasts(fault)
                worker.thaw()
            case Kind.SLOW:
                worker.slow(fault.amount)
                await self._while_it_lasts(fault)
                worker.slow(1.0)
            case _:
                assert fault.kind in OF_EVENTS
                worker.spoil(EventTrouble(fault.kind))
                await self._while_it_lasts(fault)
                worker.spoil(None)

    async def _lane(self, fault: Fault, source: str, destination: str) -> None:
        lanes = self._deployment.lanes
        match fault.kind:
            case Kind.LANE_STALL:
                lanes.hold(source, destination)
                left_s = fault.duration_s
                while left_s > STALL_S:
                    await asyncio.sleep(STALL_S)
                    left_s = left_s - STALL_S if self._loop.time() < self._over_s + LATEST_S else 0.0
                    self._cut(source, destination)
                await asyncio.sleep(left_s)
                lanes.let_go(source, destination)
            case Kind.LANE_SLOW:
                lanes.condition(source, destination).slowness = fault.amount
                await self._while_it_lasts(fault)
                lanes.condition(source, destination).slowness = 1.0
            case _:
                self._cut(source, destination)

    def _cut(self, source: str, destination: str) -> None:
        workers = self._deployment.workers
        if source in workers and destination in workers:
            self._deployment.lanes.cut(workers[source].info.lane, workers[destination].info.lane)

    async def _store(self, fault: Fault) -> None:
        store = self._deployment.store
        assert store is not None
        store.disconnect()
        if fault.kind is Kind.STORE_LOST:
            store.clear()
        await self._while_it_lasts(fault)
        store.reconnect()

    def _abort(self, share: float) -> None:
        for request_id in tuple(self._clients.running):
            if self._rng.random() < share:
                self._clients.abort(request_id)


class EventTrouble:
    """Faults of the KV events in a worker's messages to single gateways: lost, late, twice, swapped."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._earlier: tuple[KVEvents, ...] = ()

    def __call__(self, message: StepMessage) -> StepMessage:
        events, earlier = message.events, self._earlier
        match self._kind:
            case Kind.EVENTS_DROP:
                events = ()
            case Kind.EVENTS_DOUBLE:
                events += events
            case Kind.EVENTS_DELAY:  # delayed events come with the next message
                events, self._earlier = earlier, events
            case Kind.EVENTS_SWAP if events:  # every second message's events come before the first's
                events, self._earlier = (events + earlier, ()) if earlier else ((), events)
        return replace(message, events=events)
