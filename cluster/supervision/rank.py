"""One rank of a worker in this process: opened, served, and reported as events. The same under Ray and in a terminal.

start(spec) ─▶ Loading ... ─▶ Serving (rank 0 only) ─▶ Ended           Logged comes in between
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from protos.errors import BatonError
from protos.hints import byte_count
from protos.tls import PeerTls
from protos.values import ErrorInfo, WorkerInfo, WorkerRole
from protos.wire import error_info
from workers.cores import Cores, claim_cores, num_cores, spin_briefly
from workers.worker_config import RankId, TransferConfig, WorkerConfig

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.rpc.role_change import MakeRole
    from workers.rpc.worker import Worker, WorkerParts

log = logging.getLogger("baton.worker")

Result = TypeVar("Result")
Progress = Callable[[int, int], None]

STEPS_OF_PROGRESS = 20
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/dxg"))  # the last is WSL's


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The spec of a rank's process. `port`: where rank 0 serves; 0 takes any free one. When a signal ends the process,
    running requests have `grace_s` to finish."""

    role: WorkerRole
    worker: WorkerConfig
    rank_id: RankId
    port: int = 0
    peers: PeerTls = field(default_factory=PeerTls)
    grace_s: float = 0.0
    downloads: bool = False  # models that are in the supervisor's cache of the hub


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """`share` of a rank's `num_bytes` of weights has been read, from 0 to 1."""

    share: float
    num_bytes: int = 0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        speed = f", {byte_count(self.num_bytes)} at {byte_count(self.bytes_per_s)}/s" if self.num_bytes else ""
        return f"reading weights, {self.share:.0%}{speed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    info: WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    level: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The rank has ended. `error` is None after a requested stop."""

    error: ErrorInfo | None = None


Event = Loading | Serving | Logged | Ended


class LocalRank:
    """Lives on one event loop. After `start` it runs until it fails or `stop` is called. `supervised` is called
    whenever a supervisor has checked the worker's health."""

    def __init__(self, supervised: Callable[[], None] = lambda: None) -> None:
        self._supervised = supervised
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None

    def start(self, orders: RankSpec) -> None:
        assert self._task is None, "a rank starts once"
        self._task = self._loop.create_task(self._run(orders))

    async def news(self) -> Sequence[Event]:
        """The events since the last call, oldest first; waits for the first one."""
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        return events

    async def leave(self, grace_s: float) -> None:
        """Like `stop`, but running requests may finish or migrate first, for `grace_s`."""
        if self._worker is not None and self._task is not None:
            self._worker.leave()
            await asyncio.wait([self._task], timeout=grace_s)
        await self.stop()

    async def stop(self) -> None:
        """Ends the rank; returns when it has ended. A follower that has opened ends only with its rank 0."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    def tell(self, event: Event) -> None:
        """Callable from any thread."""
        self._loop.call_soon_threadsafe(self._note, event)

    def _note(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    async def _run(self, orders: RankSpec) -> None:
        try:
            await (self._lead(orders) if orders.rank_id.rank == 0 else self._follow(orders))
        except Exception as error:  # any error: the supervisor needs it
            if not isinstance(error, BatonError):
                log.exception("rank %d of %s broke", orders.rank_id.rank, orders.rank_id.worker_id)
            self._note(Ended(error=error_info(error)))
        else:
            self._note(Ended())

    async def _lead(self, orders: RankSpec) -> None:
        cores = Cores()

        def open_near() -> WorkerParts:
            nonlocal cores
            cores = _claim(orders)
            cores.stay_near()
            return _open_worker(orders, self._steps())

        opening = in_thread(open_near)
        if not await self._before_stop(opening):
            opening.add_done_callback(lambda _: cores.release())  # the thread computes on them until then
            return
        try:
            await self._serve(orders, opening.result(), cores)
        finally:
            cores.release()

    async def _serve(self, orders: RankSpec, parts: WorkerParts, cores: Cores) -> None:
        from workers.rpc.worker import Worker

        worker = self._worker = Worker(parts)
        try:
            info = await worker.start(
                orders.rank_id.host, orders.port, peers=orders.peers, prepare=cores.bind, supervised=self._supervised,
                changed=lambda info: self._note(Serving(info=info)),
            )  # fmt: skip
            self._note(Serving(info=info))
            serving = asyncio.ensure_future(worker.wait())
            if await self._before_stop(serving):
                serving.result()
            serving.cancel()
        finally:
            await worker.stop()

    async def _follow(self, orders: RankSpec) -> None:
        following = in_thread(lambda: _follow_worker(orders))
        if await self._before_stop(following):
            following.result()

    async def _before_stop(self, work: asyncio.Future[Result]) -> bool:
        """Waits for `work` or for a stop. Returns whether `work` ended."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        both: list[asyncio.Future[Any]] = [work, stopping]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return work.done()

    def _steps(self) -> Progress:
        reported, start_s = -1, time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal reported
            step = STEPS_OF_PROGRESS * done // total if total else STEPS_OF_PROGRESS
            if step != reported:
                reported = step
                rate = done / max(time.monotonic() - start_s, 1e-3)
                self.tell(Loading(share=step / STEPS_OF_PROGRESS, num_bytes=done, bytes_per_s=rate))

        return progress


def _claim(orders: RankSpec) -> Cores:
    """The cores on which this rank's threads compute; none on a GPU."""
    device, binding, rank = orders.worker.device, orders.worker.bind_cores, orders.rank_id.rank
    if "torch" not in sys.modules and (device == "cpu" or (device == "auto" and not _has_gpu_driver())):
        num_threads = os.environ.get("OMP_NUM_THREADS", "")
        if not num_threads.isdigit():
            num_threads = os.environ["OMP_NUM_THREADS"] = str(num_cores())
        spin_briefly()
        return claim_cores(int(num_threads), binding, rank)
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return Cores()
    return claim_cores(torch.get_num_threads(), binding, rank)


def _has_gpu_driver() -> bool:
    """Checks for a GPU without importing torch, whose import fixes how long OpenMP's threads spin. If False, torch
    finds none either."""
    return any(path.exists() for path in DRIVER_FILES)


def _open_worker(orders: RankSpec, on_progress: Progress) -> WorkerParts:
    """Imports the pools, and torch with them, and reads the model. Takes seconds, on a thread."""
    if orders.downloads:
        from cluster.hub.local_models import with_cached_models

        orders = replace(orders, worker=with_cached_models(orders.worker))
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing else is to ask the hub
    from decode_pool.decode_role import DecodeRole
    from prefill_pool.prefill_role import PrefillRole
    from workers.rpc.assembly import assemble

    role = PrefillRole if orders.role is WorkerRole.PREFILL else DecodeRole
    parts = assemble(orders.worker, orders.rank_id, kind=orders.role, role=role, on_progress=on_progress)
    return parts if orders.role is WorkerRole.COLOCATED else replace(parts, roles=next_roles(parts.engine))


def next_roles(
    engine: Engine, prefill: TransferConfig | None = None, decode: TransferConfig | None = None
) -> dict[WorkerRole, MakeRole]:
    """The roles of a worker of two pools. A colocated one may free KV that the others exchange, and keeps its role."""
    from decode_pool.decode_role import DecodeRole
    from prefill_pool.prefill_role import PrefillRole
    from workers.transfer.transfer_role import TransferRole

    def present() -> TransferRole:
        assert isinstance(engine.role, TransferRole)
        return engine.role

    return {
        WorkerRole.PREFILL: lambda: PrefillRole.replacing(present(), prefill),
        WorkerRole.DECODE: lambda: DecodeRole.replacing(present(), decode),
    }


def _follow_worker(orders: RankSpec) -> None:
    cores = _claim(orders)
    cores.bind()
    from workers.rpc.assembly import follow  # and torch with it

    try:
        follow(orders.worker, orders.rank_id)
    finally:
        cores.release()


def in_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs blocking work on a daemon thread; an executor's threads would keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(settle_it: Callable[[], None]) -> None:
        if not future.done():
            settle_it()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where the result is awaited
            failure = error
            loop.call_soon_threadsafe(settle, lambda: future.set_exception(failure))
        else:
            loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

    threading.Thread(target=run, daemon=True, name="work").start()
    return future
