"""Launches a worker: reserves a place, starts a process for each rank, and joins their events in one stream.

launch ─▶ place ─▶ processes ─▶ specs, with the address of rank 0 ─▶ events ...
adopt ──▶ the processes that run already ──────────────────────────▶ events ...
closed, or a rank is gone ─▶ a stop in order, if all are there ─▶ every process killed, place released
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cluster.config.cluster_config import ClusterConfig
from cluster.config.revised import revised
from cluster.ray.hosts import Host, RankConnection, WorkerPlace
from cluster.supervision.living import LivingWorker
from cluster.supervision.rank import Ended, Event, Logged, RankSpec
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import BatonError, Misconfigured, WorkerLost
from protos.values import LOOPBACK
from protos.wire import raised
from workers.speculation.registry import SpeculateMode
from workers.worker_config import RankId

log = logging.getLogger("baton.cluster")

POLITE_STOP_S = 5.0
KILL_S = 2.0
START_S = 60.0
NO_ROOM_S = 5.0
LAST_WORDS_S = 0.5

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Processes:
    """The processes of a worker that may exist: their names, machines, ids (0: unknown) and links."""

    hosts: dict[str, Host] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    links: dict[str, RankConnection] = field(default_factory=dict)

    def in_order(self) -> list[RankConnection]:
        return [self.links[name] for name in self.pids]

    async def end(self) -> None:
        """All processes, also those without a link."""
        closing = [link.close() for link in self.links.values()]
        closing += [
            host.end(name, self.pids.get(name, 0)) for name, host in self.hosts.items() if name not in self.links
        ]
        await asyncio.gather(*closing, return_exceptions=True)


class WorkerPlaces(Protocol):
    """Reserves shares of machines for workers."""

    @property
    def trouble(self) -> str:
        """Why no share can be reserved at present; "" if it can."""
        ...

    async def take(self, plan: WorkerPlan) -> WorkerPlace:
        """Waits until there is room. Raises WorkerLost."""
        ...

    async def retake(self, plan: WorkerPlan, living: LivingWorker) -> WorkerPlace:
        """The place of a worker that runs already. Raises WorkerLost."""
        ...

    async def give_back(self, plan: WorkerPlan) -> None:
        """Releases the place of a worker that has ended and may be started again. Never fails."""
        ...

    async def release(self, worker_id: str) -> None:
        """Releases the place of a worker that will not be started again. Never fails."""
        ...


class RankLauncher:
    """One for each cluster. Every process that it starts or finds is killed when its worker's stream ends or is closed.

    `record` is called before a process is started, and when more is known of it. A worker has `polite_s` to stop; with
    None its processes are left alone.
    """

    polite_s: float | None = POLITE_STOP_S

    def __init__(self, config: ClusterConfig, places: WorkerPlaces, record: Callable[[LivingWorker], None]) -> None:
        self._config = config
        self._places = places
        self._record = record

    async def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]:
        """Yields rank 0's events, and log records of all ranks. Raises the BatonError with which the worker ended."""
        processes = Processes()
        try:
            placing = asyncio.ensure_future(self._places.take(plan))
            try:
                if not (await asyncio.wait([placing], timeout=NO_ROOM_S))[0]:
                    why = self._places.trouble or "no machine has that free"
                    yield Logged(level=logging.WARNING, message=f"waits for {_needs(plan)}: {why}")
                place = await placing
            finally:
                placing.cancel()
            living = LivingWorker(
                worker_id=plan.worker_id,
                incarnation=incarnation,
                hosts=tuple(host.address for host in place.hosts),
                devices=place.devices,
                names=tuple(f"{plan.worker_id}.{incarnation}.{rank}" for rank in range(plan.num_ranks)),
                pids=(),
            )
            self._record(living)
            await self._start_in_time(plan, living, place, processes)
            async with aclosing(self._follow(plan, processes.in_order())) as events:
                async for event in events:
                    yield event
        finally:
            await _in_full(self._end(plan, processes))

    async def adopt(self, plan: WorkerPlan, living: LivingWorker) -> AsyncGenerator[Event, None]:
        """Like `launch`, for a worker whose processes run. The first event is its present state."""
        processes = Processes(pids=dict(zip(living.names, living.pids or (0,) * len(living.names), strict=True)))
        try:
            place = await self._places.retake(plan, living)
            processes.hosts.update(zip(living.names, place.hosts, strict=True))

            async def attach(name: str, pid: int) -> None:
                processes.links[name] = await processes.hosts[name].attach(name, pid)

            await _all([attach(name, pid) for name, pid in processes.pids.items()])
            async with aclosing(self._follow(plan, processes.in_order())) as events:
                async for event in events:
                    yield event
        finally:
            await _in_full(self._end(plan, processes))

    async def release(self, worker_id: str) -> None:
        await self._places.release(worker_id)

    async def _follow(self, plan: WorkerPlan, links: Sequence[RankConnection]) -> AsyncGenerator[Event, None]:
        """Yields the ranks' events. If no rank has failed, stops rank 0 gracefully at the end; the others end with
        it."""
        intact = True
        try:
            async with aclosing(merged(plan.worker_id, links)) as events:
                async for event in events:
                    yield event
        except BatonError:
            intact = False
            raise
        finally:
            if intact and self.polite_s:
                with suppress(TimeoutError, BatonError):
                    async with asyncio.timeout(self.polite_s):
                        await links[0].stop()

    async def _end(self, plan: WorkerPlan, processes: Processes) -> None:
        if self.polite_s is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await processes.end()
        await self._places.give_back(plan)

    async def _start_in_time(
        self, plan: WorkerPlan, living: LivingWorker, place: WorkerPlace, processes: Processes
    ) -> None:
        """Raises WorkerLost if the processes do not start although there is room."""
        try:
            async with asyncio.timeout(START_S):
                await self._start(plan, living, place, processes)
        except TimeoutError:
            raise WorkerLost(f"its ranks did not start within {START_S:g} s") from None

    async def _start(self, plan: WorkerPlan, living: LivingWorker, place: WorkerPlace, processes: Processes) -> None:
        """Starts the processes. Adds each to `processes` before it is started, and each link when it is made."""
        processes.hosts.update(zip(living.names, place.hosts, strict=True))
        threads = {name: str(plan.num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environments = [
            threads | ({"CUDA_VISIBLE_DEVICES": place.devices[rank]} if place.devices else {})
            for rank in range(plan.num_ranks)
        ]
        meeting_places = await _all([host.meeting_place() for host in place.hosts])
        (store_host, store_port), store_key = meeting_places[0], secrets.token_bytes(32)

        async def start(name: str, own: dict[str, str], leader: str) -> int:
            processes.pids[name] = pid = await processes.hosts[name].start(name, own, leader)
            return pid

        async def order(name: str, pid: int, orders: RankSpec) -> None:
            processes.links[name] = await processes.hosts[name].order(name, pid, orders)

        processes.pids.update(dict.fromkeys(living.names, 0))
        pids = await _all([
            start(name, own, living.names[0] if rank and host == living.hosts[0] else "")
            for rank, (name, own, host) in enumerate(zip(living.names, environments, living.hosts, strict=True))
        ])  # fmt: skip
        self._record(replace(living, pids=tuple(pids)))
        orders = (
            self._orders(plan, RankId(
                worker_id=plan.worker_id, incarnation=living.incarnation, rank=rank, size=plan.num_ranks, host=address,
                store_host=store_host, store_port=store_port, store_key=store_key,
                group_host=LOOPBACK if len(set(living.hosts)) == 1 else address,
            ))
            for rank, (address, _) in enumerate(meeting_places)
        )  # fmt: skip
        await _all([order(name, pid, own) for name, pid, own in zip(living.names, pids, orders, strict=True)])
        shown = ", ".join(map(str, pids))
        log.info("%s: runs in process %s", plan.worker_id, shown, extra={"worker": plan.worker_id})

    def _orders(self, plan: WorkerPlan, rank_id: RankId) -> RankSpec:
        config = revised(self._config, plan.revision)
        # A rank's process may run in another working directory.
        model, mode = str(Path(config.worker.model).absolute()), SpeculateMode.of(config.worker.speculate).absolute()
        return RankSpec(
            role=plan.role,
            worker=replace(config.worker, model=model, speculate=mode, device=plan.device, tp=plan.num_ranks),
            peers=config.peers,
            rank_id=rank_id,
            grace_s=config.supervision.grace_s,
            downloads=config.ray.downloads,
        )


async def merged(worker_id: str, ranks: Sequence[RankConnection]) -> AsyncGenerator[Event, None]:
    """Ends with rank 0. Raises the first rank's error, or a more specific one of another rank."""
    arrived: asyncio.Queue[Event | asyncio.Task[BatonError | None]] = asyncio.Queue()

    async def pump(number: int, rank: RankConnection) -> BatonError | None:
        while True:
            try:
                events = await rank.news()
            except WorkerLost as error:
                message = error.message
                if len(ranks) > 1:
                    message = message.replace("its process", f"the process of rank {number} of {worker_id}", 1)
                return WorkerLost(message)
            for event in events:
                if isinstance(event, Ended):
                    return raised(event.error) if event.error is not None else None
                if number == 0 or isinstance(event, Logged):
                    arrived.put_nowait(event)

    pumps = [asyncio.create_task(pump(number, rank)) for number, rank in enumerate(ranks)]
    for task in pumps:
        task.add_done_callback(arrived.put_nowait)
    try:
        while True:
            item = await arrived.get()
            if not isinstance(item, asyncio.Task):
                yield item
            elif item.result() is not None:
                await asyncio.wait(pumps, timeout=LAST_WORDS_S)
                raise _most_telling([task.result() for task in pumps if task.done()])
            elif item is pumps[0]:
                return
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _most_telling(errors: Sequence[BatonError | None]) -> BatonError:
    """Ranks reasons: "another rank is lost" is the least specific, wrong settings the most."""
    known = [error for error in errors if error is not None]
    return min(known, key=lambda error: (not isinstance(error, Misconfigured), isinstance(error, WorkerLost)))


async def _all(work: Sequence[Awaitable[Result]]) -> list[Result]:
    """Raises the first error once all have ended."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return [one for one in ended if not isinstance(one, BaseException)]


async def _in_full(work: Coroutine[Any, Any, None]) -> None:
    """Completes even if the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _needs(plan: WorkerPlan) -> str:
    totals: dict[str, float] = {}
    for bundle in plan.bundles():
        for name, amount in bundle.items():
            totals[name] = totals.get(name, 0.0) + amount
    return ", ".join(f"{amount:g} {name}" for name, amount in totals.items())
