"""Workers that live and die as a test says, and a supervisor over them: no Ray, no processes, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cluster.config.cluster_config import PoolsConfig, SupervisionConfig
from cluster.supervision.rank import Ended, Event, Loading, Serving
from cluster.supervision.supervisor import RunningWorker, SupervisedWorker, Supervisor
from cluster.supervision.worker_placement import NodeResources, WorkerPlan, plan, replan
from protos.errors import BatonError
from protos.values import KVLayout, LaneAddress, WorkerInfo, WorkerRole
from router.fleet.successors import Successor

PLANS = plan(PoolsConfig(), (NodeResources(cpus=2.0),), tp=1, device="cpu")
LARGER = replan(PLANS, PoolsConfig(decode=2), (NodeResources(cpus=2.0),), tp=1)
ROLES = {one.worker_id: one.role for one in LARGER}
FLIPPED = replan(LARGER, PoolsConfig(prefill=2), (NodeResources(cpus=2.0),), tp=1, flips={"decode-1": PLANS[0].role})
LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


class Life:
    """One incarnation, steered by the test."""

    def __init__(self, worker_id: str, incarnation: int, revision: str = "") -> None:
        self.incarnation = incarnation
        self._revision = revision
        self.closed = False
        self._worker_id = worker_id
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    def serve(self, address: str) -> None:
        lane = LaneAddress(worker_id=self._worker_id, incarnation=self.incarnation, host="h", port=1)
        info = WorkerInfo(
            worker_id=self._worker_id, incarnation=self.incarnation, role=ROLES[self._worker_id], model="m",
            address=address, layout=LAYOUT, lane=lane, max_model_len=32, vocab_size=32, revision=self._revision,
        )  # fmt: skip
        self._events.put_nowait(Loading(share=0.5))
        self._events.put_nowait(Serving(info=info))

    def die(self, error: Exception) -> None:
        self._events.put_nowait(error)

    def leave(self) -> None:
        self._events.put_nowait(Ended())

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Ended):
                    return
                yield event
        finally:
            self.closed = True


class Stage:
    """Launcher, announcer and sleep in one: what the supervisor does is written down, in order."""

    def __init__(self) -> None:
        self.lives: dict[str, list[Life]] = {worker.worker_id: [] for worker in PLANS}
        self.done: list[str] = []
        self.starting_told: list[str] = []
        self.slept: list[float] = []
        self.beats: asyncio.Queue[BatonError | None] = asyncio.Queue()
        self.shown: list[SupervisedWorker] = []
        self.turn = asyncio.Condition()
        self.drained = asyncio.Event()
        self.retired = asyncio.Event()
        self.flipped = asyncio.Event()

    async def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]:
        life = Life(plan.worker_id, incarnation, plan.revision.name)
        self.lives.setdefault(plan.worker_id, []).append(life)
        await self._apply(f"launch {plan.worker_id}")
        async for event in life.events():
            yield event

    async def starting(self, worker_id: str, successor: Successor) -> None:
        self.starting_told.append(f"{worker_id} {successor.role} {successor.loaded:g}")

    async def announce(self, worker_id: str, address: str) -> None:
        await self._apply(f"announce {worker_id} {address}")

    async def withdraw(self, worker_id: str) -> None:
        await self._apply(f"withdraw {worker_id}")

    async def close(self) -> None:
        await self._apply("close")

    async def check_health(self, address: str) -> None:
        """Reports the health that the test sets; without one it waits."""
        if (error := await self.beats.get()) is not None:
            raise error

    async def drain(self, address: str) -> None:
        """Until the test says that nothing runs there any more."""
        await self._apply(f"drain {address}")
        await self.drained.wait()

    async def retire(self, address: str) -> None:
        """Returns once the test allows it."""
        await self._apply(f"retire {address}")
        await self.retired.wait()

    async def change_role(self, address: str, role: WorkerRole) -> None:
        """Until the test says that the worker has it."""
        await self._apply(f"{address} becomes {role}")
        await self.flipped.wait()

    async def release(self, worker_id: str) -> None:
        await self._apply(f"release {worker_id}")

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 3))
        await asyncio.sleep(0)

    async def until(self, line: str) -> None:
        async with self.turn:
            await self.turn.wait_for(lambda: line in self.done)

    async def launched(self, worker_id: str, *, times: int) -> None:
        async with self.turn:
            await self.turn.wait_for(lambda: len(self.lives.get(worker_id, ())) == times)

    async def _apply(self, line: str) -> None:
        async with self.turn:
            self.done.append(line)
            self.turn.notify_all()


async def start(stage: Stage, supervisor: Supervisor, **left: Any) -> asyncio.Task[None]:
    running = asyncio.create_task(supervisor.run(PLANS, **left))
    await stage.until("launch prefill-0")
    await stage.until("launch decode-0")
    return running


def adopted(life: Life, *, serves: bool) -> dict[str, RunningWorker]:
    """decode-0, which an earlier supervisor has launched."""
    life.serve("h:5")
    info = WorkerInfo(
        worker_id="decode-0", incarnation=7, role=PLANS[1].role, model="m", address="h:5", layout=LAYOUT,
        lane=LaneAddress(worker_id="decode-0", incarnation=7, host="h", port=1), max_model_len=32, vocab_size=32,
    )  # fmt: skip
    return {"decode-0": RunningWorker(
        has_served=serves, incarnation=7, info=info if serves else None, follow=life.events
    )}  # fmt: skip


def supervisor_of(stage: Stage, config: SupervisionConfig | None = None) -> Supervisor:
    return Supervisor(
        launcher=stage, announcer=stage, control=stage, config=config or SupervisionConfig(), first_incarnation=100,
        watch=stage.shown.append, clock=lambda: 0.0, sleep=stage.sleep,
    )  # fmt: skip


async def serving(stage: Stage, supervisor: Supervisor) -> asyncio.Task[None]:
    """All of PLANS, at HOST:1."""
    running = await start(stage, supervisor)
    for worker in PLANS:
        stage.lives[worker.worker_id][0].serve(f"{worker.worker_id}:1")
    await supervisor.ready()
    return running


async def grown(stage: Stage, supervisor: Supervisor) -> asyncio.Task[None]:
    running = await serving(stage, supervisor)
    resizing = asyncio.create_task(supervisor.resize(LARGER))
    await stage.until("launch decode-1")
    assert not resizing.done()
    stage.lives["decode-1"][0].serve("decode-1:1")
    await resizing
    return running
