"""The supervisor over workers that live and die as a test says: no Ray, no processes, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest

from cluster.config.config import PoolsConfig, SupervisionConfig
from cluster.supervision.lifecycle import LifeState
from cluster.supervision.placement import NodeResources, WorkerPlan, plan, replan
from cluster.supervision.rank import Ended, Event, Loading, Serving
from cluster.supervision.supervisor import RunningWorker, SupervisedWorker, Supervisor
from protos.errors import BadCheckpoint, BatonError, WorkerLost
from protos.values import KVLayout, LaneAddress, WorkerInfo
from router.fleet.successors import Successor

PLANS = plan(PoolsConfig(), (NodeResources(cpus=2.0),), tp=1, device="cpu")
LARGER = replan(PLANS, PoolsConfig(decode=2), (NodeResources(cpus=2.0),), tp=1)
LAYOUT = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


class Life:
    """One incarnation, steered by the test."""

    def __init__(self, worker_id: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self.closed = False
        self._worker_id = worker_id
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    def serve(self, address: str) -> None:
        lane = LaneAddress(worker_id=self._worker_id, incarnation=self.incarnation, host="h", port=1)
        info = WorkerInfo(
            worker_id=self._worker_id, incarnation=self.incarnation, role=PLANS[0].role, model="m", address=address,
            layout=LAYOUT, lane=lane, max_model_len=32, vocab_size=32,
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

    async def launch(self, plan: WorkerPlan, incarnation: int) -> AsyncGenerator[Event, None]:
        life = Life(plan.worker_id, incarnation)
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
        """As the test says; when it says nothing, nobody looks."""
        if (error := await self.beats.get()) is not None:
            raise error

    async def drain(self, address: str) -> None:
        """Until the test says that nothing runs there any more."""
        await self._apply(f"drain {address}")
        await self.drained.wait()

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


@pytest.fixture
async def stage() -> Stage:
    return Stage()


@pytest.fixture
async def supervisor(stage: Stage) -> AsyncIterator[Supervisor]:
    made = Supervisor(
        PLANS,
        launcher=stage,
        announcer=stage,
        check_health=stage.check_health,
        drain=stage.drain,
        config=SupervisionConfig(initial_backoff_s=1.0, health_period_s=7.0, max_failed_checks=3),
        first_incarnation=100,
        watch=stage.shown.append,
        clock=lambda: 0.0,
        sleep=stage.sleep,
    )
    yield made
    await made.stop()


async def start(stage: Stage, supervisor: Supervisor) -> asyncio.Task[None]:
    running = asyncio.create_task(supervisor.run())
    await stage.until("launch prefill-0")
    await stage.until("launch decode-0")
    return running


async def test_all_start_at_once_and_are_announced_when_they_serve(stage: Stage, supervisor: Supervisor) -> None:
    running = await start(stage, supervisor)
    ready = asyncio.create_task(supervisor.ready())
    stage.lives["decode-0"][0].serve("h:2")
    await stage.until("announce decode-0 h:2")
    assert not ready.done()
    stage.lives["prefill-0"][0].serve("h:1")
    await ready
    assert stage.done[2:] == ["announce decode-0 h:2", "announce prefill-0 h:1"]
    assert sorted(supervisor.addresses()) == ["h:1", "h:2"]
    assert {life.incarnation for lives in stage.lives.values() for life in lives} == {101, 102}
    await supervisor.stop()
    await running


async def test_a_dead_worker_comes_back_as_a_new_incarnation(stage: Stage, supervisor: Supervisor) -> None:
    running = await start(stage, supervisor)
    for worker_id, lives in stage.lives.items():
        lives[0].serve(f"{worker_id}:1")
    await supervisor.ready()
    first = stage.lives["decode-0"][0]
    first.die(WorkerLost("killed"))
    await stage.launched("decode-0", times=2)
    second = stage.lives["decode-0"][1]
    assert first.closed
    assert second.incarnation > max(first.incarnation, stage.lives["prefill-0"][0].incarnation)
    assert 1.0 in stage.slept
    second.serve("decode-0:2")
    await supervisor.ready()
    assert "announce decode-0 decode-0:2" in stage.done
    assert len(stage.lives["prefill-0"]) == 1
    assert not running.done()


async def test_gateways_know_that_a_successor_is_starting_and_how_far_it_is(
    stage: Stage, supervisor: Supervisor
) -> None:
    await start(stage, supervisor)
    for worker_id, lives in stage.lives.items():
        lives[0].serve(f"{worker_id}:1")
    await supervisor.ready()
    stage.starting_told.clear()
    stage.lives["decode-0"][0].die(WorkerLost("killed"))
    await stage.launched("decode-0", times=2)
    assert stage.starting_told == ["decode-0 decode 0", "decode-0 decode 0"], "when it died, and when it was launched"
    stage.lives["decode-0"][1].serve("decode-0:2")
    await supervisor.ready()
    assert stage.starting_told[2:] == ["decode-0 decode 0.5"]


async def test_a_worker_that_was_drained_is_replaced_at_once(stage: Stage, supervisor: Supervisor) -> None:
    running = await start(stage, supervisor)
    for worker_id, lives in stage.lives.items():
        lives[0].serve(f"{worker_id}:1")
    await supervisor.ready()
    stage.lives["decode-0"][0].leave()
    await stage.launched("decode-0", times=2)
    assert 1.0 not in stage.slept, "nothing has failed: there is nothing to wait for"
    stage.lives["decode-0"][1].serve("decode-0:2")
    await supervisor.ready()
    assert not running.done()


async def test_a_worker_that_ends_before_it_serves_has_failed(stage: Stage, supervisor: Supervisor) -> None:
    await start(stage, supervisor)
    stage.lives["decode-0"][0].leave()
    await stage.launched("decode-0", times=2)
    assert 1.0 in stage.slept


async def test_a_worker_that_is_there_but_gets_nowhere_is_started_again(stage: Stage, supervisor: Supervisor) -> None:
    await start(stage, supervisor)
    stuck = WorkerLost("no step finished for 60 s")
    for beat in (stuck, stuck, None, stuck, stuck, stuck):
        stage.beats.put_nowait(beat)
    stage.lives["decode-0"][0].serve("h:1")
    await stage.launched("decode-0", times=2)
    assert stage.lives["decode-0"][0].closed
    assert stage.beats.empty()
    reasons = [view.life.reason for view in stage.shown if view.life.state is LifeState.WAITING]
    assert reasons == ["it is not well: no step finished for 60 s"]


async def test_a_worker_that_can_never_start_ends_everything_with_its_reason(
    stage: Stage, supervisor: Supervisor
) -> None:
    running = await start(stage, supervisor)
    stage.lives["decode-0"][0].die(BadCheckpoint("no weights in there"))
    with pytest.raises(BadCheckpoint, match="no weights in there"):
        await running
    await supervisor.stop()
    assert len(stage.lives["decode-0"]) == 1
    assert stage.lives["prefill-0"][0].closed


async def test_a_bug_in_one_workers_launch_is_counted_and_does_not_end_the_others(
    stage: Stage, supervisor: Supervisor
) -> None:
    running = await start(stage, supervisor)
    stage.lives["prefill-0"][0].die(ValueError("a bug"))
    await stage.launched("prefill-0", times=2)
    assert supervisor.num_faults == 1
    assert not running.done()


async def test_a_stop_ends_every_worker_and_withdraws_it(stage: Stage, supervisor: Supervisor) -> None:
    running = await start(stage, supervisor)
    await supervisor.stop()
    await running
    assert all(lives[0].closed for lives in stage.lives.values())
    assert stage.done[2:] == ["withdraw prefill-0", "withdraw decode-0"]


async def test_a_terminal_is_shown_every_step(stage: Stage, supervisor: Supervisor) -> None:
    await start(stage, supervisor)
    stage.lives["prefill-0"][0].serve("h:1")
    await stage.until("announce prefill-0 h:1")
    stage.lives["decode-0"][0].serve("h:2")
    await supervisor.ready()
    steps = [(view.life.state, view.loaded) for view in stage.shown if view.worker_id == "prefill-0"]
    assert steps == [(LifeState.STARTING, 0.0), (LifeState.STARTING, 0.5), (LifeState.SERVING, 1.0)]


def adopting(stage: Stage, life: Life, *, serves: bool) -> Supervisor:
    """Of a supervisor before it that has launched decode-0."""
    life.serve("h:5")
    info = WorkerInfo(
        worker_id="decode-0", incarnation=7, role=PLANS[1].role, model="m", address="h:5", layout=LAYOUT,
        lane=LaneAddress(worker_id="decode-0", incarnation=7, host="h", port=1), max_model_len=32, vocab_size=32,
    )  # fmt: skip
    running = RunningWorker(has_served=serves, incarnation=7, info=info if serves else None, follow=life.events)
    return Supervisor(
        PLANS, launcher=stage, announcer=stage, check_health=stage.check_health, drain=stage.drain,
        config=SupervisionConfig(), first_incarnation=100, running={"decode-0": running}, watch=stage.shown.append,
        clock=lambda: 0.0, sleep=stage.sleep,
    )  # fmt: skip


@pytest.mark.parametrize("serves", [True, False], ids=["that serves", "that loads"])
async def test_a_worker_that_runs_is_followed_and_not_launched(stage: Stage, serves: bool) -> None:
    life = Life("decode-0", 7)
    supervisor = adopting(stage, life, serves=serves)
    task = asyncio.create_task(supervisor.run())
    await stage.until("announce decode-0 h:5")
    await stage.until("launch prefill-0")
    assert stage.lives["decode-0"] == []
    assert supervisor.views["decode-0"].life.state is LifeState.SERVING
    assert ("decode-0 decode 0" in stage.starting_told) != serves, "one that serves is not announced as starting"
    life.die(WorkerLost("gone"))
    await stage.until("launch decode-0")
    assert stage.lives["decode-0"][0].incarnation > 7
    await supervisor.stop()
    await asyncio.wait([task])


async def test_an_adopted_worker_is_asked_for_its_health_before_its_stream_says_anything(stage: Stage) -> None:
    """Ray, through which a stream comes, may be away for long."""

    async def silent() -> AsyncGenerator[Event, None]:
        await asyncio.Event().wait()
        yield Ended()

    life = Life("decode-0", 7)
    supervisor = adopting(stage, life, serves=True)
    supervisor._running = {"decode-0": replace(supervisor._running["decode-0"], follow=silent)}
    task = asyncio.create_task(supervisor.run())
    for _ in range(SupervisionConfig().max_failed_checks):
        stage.beats.put_nowait(WorkerLost("no answer"))
    await stage.until("launch decode-0")
    await supervisor.stop()
    await asyncio.wait([task])


async def test_settings_that_once_served_are_not_given_up_by_the_next_supervisor(stage: Stage) -> None:
    supervisor = Supervisor(
        PLANS, launcher=stage, announcer=stage, check_health=stage.check_health, drain=stage.drain,
        config=SupervisionConfig(), first_incarnation=100, running={"decode-0": RunningWorker(has_served=True)},
        clock=lambda: 0.0, sleep=stage.sleep,
    )  # fmt: skip
    task = await start(stage, supervisor)
    stage.lives["decode-0"][0].die(BadCheckpoint("the disk is away"))
    await stage.launched("decode-0", times=2)
    await supervisor.stop()
    await asyncio.wait([task])


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


async def test_a_larger_pool_starts_what_is_new_and_leaves_the_others_alone(
    stage: Stage, supervisor: Supervisor
) -> None:
    running = await grown(stage, supervisor)
    assert supervisor.plans == LARGER
    assert "announce decode-1 decode-1:1" in stage.done
    assert [len(lives) for lives in stage.lives.values()] == [1, 1, 1]
    stage.lives["decode-1"][0].die(WorkerLost("killed"))
    await stage.launched("decode-1", times=2)
    assert not running.done()


async def test_a_smaller_pool_drains_then_ends_then_withdraws(stage: Stage, supervisor: Supervisor) -> None:
    running = await grown(stage, supervisor)
    del stage.done[:]
    resizing = asyncio.create_task(supervisor.resize(PLANS))
    await stage.until("drain decode-1:1")
    assert not stage.lives["decode-1"][0].closed, "it still has work"
    stage.drained.set()
    await resizing
    assert stage.lives["decode-1"][0].closed
    assert stage.done == ["drain decode-1:1", "release decode-1", "withdraw decode-1"]
    assert (supervisor.plans, supervisor.views.keys()) == (PLANS, {"prefill-0", "decode-0"})
    assert not running.done()


async def test_a_worker_that_ends_while_it_is_drained_is_not_started_again(
    stage: Stage, supervisor: Supervisor
) -> None:
    await grown(stage, supervisor)
    resizing = asyncio.create_task(supervisor.resize(PLANS))
    await stage.until("drain decode-1:1")
    stage.lives["decode-1"][0].leave()
    await resizing
    assert len(stage.lives["decode-1"]) == 1


async def test_a_worker_that_is_not_served_from_yet_is_not_drained(stage: Stage, supervisor: Supervisor) -> None:
    await serving(stage, supervisor)
    growing = asyncio.create_task(supervisor.resize(LARGER))
    await stage.until("launch decode-1")
    await supervisor.resize(PLANS)
    await growing  # the later size counts
    assert stage.done[-2:] == ["release decode-1", "withdraw decode-1"]


async def test_a_worker_that_is_desired_again_starts_once_it_has_gone(stage: Stage, supervisor: Supervisor) -> None:
    await grown(stage, supervisor)
    shrinking = asyncio.create_task(supervisor.resize(PLANS))
    await stage.until("drain decode-1:1")
    growing = asyncio.create_task(supervisor.resize(LARGER))
    await shrinking
    stage.drained.set()
    await stage.launched("decode-1", times=2)
    stage.lives["decode-1"][1].serve("decode-1:2")
    await growing
    assert sorted(supervisor.addresses()) == ["decode-0:1", "decode-1:2", "prefill-0:1"]


async def test_a_new_worker_that_can_never_start_is_given_up_and_nothing_else_ends(
    stage: Stage, supervisor: Supervisor
) -> None:
    running = await serving(stage, supervisor)
    resizing = asyncio.create_task(supervisor.resize(LARGER))
    await stage.until("launch decode-1")
    stage.lives["decode-1"][0].die(BadCheckpoint("there is no such model"))
    with pytest.raises(BadCheckpoint, match="no such model"):
        await resizing
    await stage.until("withdraw decode-1")
    assert supervisor.plans == PLANS
    assert not running.done()


async def test_the_next_supervisor_ends_what_the_one_before_was_about_to_end(stage: Stage) -> None:
    life = Life("decode-1", 7)
    info = WorkerInfo(
        worker_id="decode-1", incarnation=7, role=PLANS[1].role, model="m", address="h:5", layout=LAYOUT,
        lane=LaneAddress(worker_id="decode-1", incarnation=7, host="h", port=1), max_model_len=32, vocab_size=32,
    )  # fmt: skip
    supervisor = Supervisor(
        PLANS, launcher=stage, announcer=stage, check_health=stage.check_health, drain=stage.drain,
        config=SupervisionConfig(), first_incarnation=100, leaving=LARGER[-1:], clock=lambda: 0.0, sleep=stage.sleep,
        running={"decode-1": RunningWorker(has_served=True, incarnation=7, info=info, follow=life.events)},
    )  # fmt: skip
    task = await start(stage, supervisor)
    await stage.until("drain h:5")
    stage.drained.set()
    await stage.until("withdraw decode-1")
    assert life.closed
    assert "decode-1" not in stage.lives
    await supervisor.stop()
    await asyncio.wait([task])
