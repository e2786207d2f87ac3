"""Carries a plan out on Ray: one placement group a worker, one actor a rank, and what they tell as one stream.

launch ─▶ placement group ─▶ actors ─▶ rank 0 says where to meet ─▶ all start ─▶ events ...
closed, or a rank is gone ─▶ a polite stop, if all are there ─▶ every process killed, room given back
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import RankActor
from cluster.config import ClusterConfig
from cluster.machines import Machines
from cluster.placement import WorkerPlan
from cluster.rank import Ended, Event, Logged, Orders, in_thread
from protos.errors import BatonError, Misconfigured, WorkerLost
from protos.wire import raised
from workers.config import Seat

POLITE_STOP_S = 5.0
KILL_S = 2.0
START_S = 60.0
NO_ROOM_S = 5.0
LAST_WORDS_S = 0.5
_FELL_SILENT = "unexpectedly exits with a connection error"
_DETAIL = re.compile(r"Worker exit detail: (?:Worker )?(.+?)(?:\. |$)")


class RayLauncher:
    """One for a cluster. Every process it starts is killed when its worker's stream ends or is closed."""

    def __init__(self, config: ClusterConfig, machines: Machines) -> None:
        self._config = config
        # Ray's processes have a working directory of their own.
        self._worker = replace(config.worker, model=str(Path(config.worker.model).absolute()))
        self._machines = machines
        self._actor = ray.remote(RankActor)

    async def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]:
        """What rank 0 tells, and what any rank logs. Raises the BatonError that the worker ended with."""
        name = f"{plan.worker_id}#{incarnation}"
        room = await self._machines.call(lambda: placement_group(plan.bundles(), strategy="STRICT_PACK", name=name))
        ranks: list[Any] = []
        intact = False
        try:
            placed = asyncio.ensure_future(room.ready())
            if not (await asyncio.wait([placed], timeout=NO_ROOM_S))[0]:
                yield Logged(level=logging.WARNING, message=f"waits for {_needs(plan)}: no machine has that free")
            await placed
            ranks += [self._rank(plan, room, number) for number in range(plan.num_ranks)]
            pids = await self._start_in_time(plan, incarnation, ranks)
            yield Logged(level=logging.INFO, message=f"runs in process {', '.join(map(str, pids))}")
            intact = True
            async with aclosing(merged(plan.worker_id, ranks)) as events:
                async for event in events:
                    yield event
        except RayError as error:
            intact = False
            raise _lost("its process", error) from error
        except BatonError:
            intact = False
            raise
        finally:
            try:
                if intact:
                    await _stop_politely(ranks[0])
            finally:  # whoever is cancelled again meanwhile kills as well: before Python 3.11.3 a timeout did that
                # Not on Machines' thread, and not for ever: Ray waits a minute for a control store that is gone itself.
                await asyncio.wait([in_thread(lambda: _kill(ranks, room))], timeout=KILL_S)

    def _rank(self, plan: WorkerPlan, room: PlacementGroup, number: int) -> Any:
        bundle = plan.bundles()[number]
        return self._actor.options(
            num_cpus=bundle.pop("CPU"),
            num_gpus=bundle.pop("GPU", 0.0),
            resources=bundle,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=number),
        ).remote(plan.num_threads)

    async def _start_in_time(self, plan: WorkerPlan, incarnation: int, ranks: Sequence[Any]) -> list[int]:
        """Raises WorkerLost when Ray has room for the processes but does not bring them up."""
        try:
            async with asyncio.timeout(START_S):
                return await self._start(plan, incarnation, ranks)
        except TimeoutError:
            raise WorkerLost(f"its processes did not come up within {START_S:g} s") from None

    async def _start(self, plan: WorkerPlan, incarnation: int, ranks: Sequence[Any]) -> list[int]:
        """Tells every rank who it is; their process ids."""
        places = await asyncio.gather(*(rank.meeting_place.remote(self._machines.host) for rank in ranks))
        store_host, store_port = places[0]
        config = self._config
        orders = [
            Orders(
                role=plan.role,
                worker=replace(self._worker, device=plan.device, tp=plan.num_ranks),
                prefill=config.prefill,
                decode=config.decode,
                peers=config.peers,
                seat=Seat(
                    worker_id=plan.worker_id,
                    incarnation=incarnation,
                    rank=number,
                    size=plan.num_ranks,
                    host=host,
                    store_host=store_host,
                    store_port=store_port,
                ),
            )
            for number, (host, _) in enumerate(places)
        ]
        started = (rank.start.remote(order) for rank, order in zip(ranks, orders, strict=True))
        return list(await asyncio.gather(*started))


async def merged(worker_id: str, ranks: Sequence[Any]) -> AsyncGenerator[Event, None]:
    """Ends with rank 0. Raises what the first rank to break broke of, or a better reason that another one has."""
    arrived: asyncio.Queue[Event | asyncio.Task[BatonError | None]] = asyncio.Queue()

    async def pump(number: int, rank: Any) -> BatonError | None:
        while True:
            try:
                events = await rank.news.remote()
            except RayError as error:
                return _lost(f"the process of rank {number} of {worker_id}" if len(ranks) > 1 else "its process", error)
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
    """That another rank is lost says least; that the settings are wrong says most."""
    known = [error for error in errors if error is not None]
    return min(known, key=lambda error: (not isinstance(error, Misconfigured), isinstance(error, WorkerLost)))


async def _stop_politely(rank: Any) -> None:
    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(POLITE_STOP_S):
            await rank.stop.remote()


def _kill(ranks: Sequence[Any], room: PlacementGroup) -> None:
    for rank in ranks:
        with suppress(RayError, ValueError):
            ray.kill(rank)
    with suppress(RayError, ValueError):
        remove_placement_group(room)


def _lost(who: str, error: RayError) -> WorkerLost:
    """In one line: Ray's own text is a page on what may have happened, and how it noticed says nothing to anybody."""
    detail = _DETAIL.search(str(error))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = detail[1] if detail else lines[-1]
    if _FELL_SILENT in said:
        said = "it was killed, or crashed (dmesg tells whether memory ran out)"
    return WorkerLost(f"{who} is gone: {said}")


def _needs(plan: WorkerPlan) -> str:
    totals: dict[str, float] = {}
    for bundle in plan.bundles():
        for name, amount in bundle.items():
            totals[name] = totals.get(name, 0.0) + amount
    return ", ".join(f"{amount:g} {name}" for name, amount in totals.items())
