"""The supervisor over workers that live and die as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from cluster.config.cluster_config import SupervisionConfig
from cluster.supervision.lifecycle import LifeState
from cluster.supervision.rank import Ended, Event
from cluster.supervision.supervisor import RunningWorker, Supervisor
from protos.errors import BadCheckpoint, WorkerLost
from tests.unit.cluster.supervision.staged_supervisor import (
    PLANS,
    Life,
    Stage,
    adopted,
    serving,
    start,
)


async def test_all_start_at_once_and_are_announced_when_they_serve(stage: Stage, supervisor: Supervisor) -> None:
    running = await start(stage, supervisor)
    ready = asyncio.create_task(supervisor.ready())
    stage.lives["decode-0"][0].serve("h:2")
    await stage.until("announce decode-0 h:2")
    assert not ready.done()
    stage.lives["prefill-0"][0].serve("h:1")
    await ready
    assert stage.done[2:] == ["announce decode-0 h:2", "announce prefill-0 h:1"]
    assert sorted([info.address for info in supervisor.serving().values()]) == ["h:1", "h:2"]
    assert {life.incarnation for lives in stage.lives.values() for life in lives} == {101, 102}
    await supervisor.stop()
    await running


async def test_a_dead_worker_comes_back_as_a_new_incarnation(stage: Stage, supervisor: Supervisor) -> None:
    running = await serving(stage, supervisor)
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


async def test_gateways_see_a_successors_progress(stage: Stage, supervisor: Supervisor) -> None:
    await serving(stage, supervisor)
    stage.starting_told.clear()
    stage.lives["decode-0"][0].die(WorkerLost("killed"))
    await stage.launched("decode-0", times=2)
    assert stage.starting_told == ["decode-0 decode 0", "decode-0 decode 0"], "when it died, and when it was launched"
    stage.lives["decode-0"][1].serve("decode-0:2")
    await supervisor.ready()
    assert stage.starting_told[2:] == ["decode-0 decode 0.5"]


async def test_a_worker_that_was_drained_is_replaced_at_once(stage: Stage, supervisor: Supervisor) -> None:
    running = await serving(stage, supervisor)
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


async def test_a_stuck_worker_is_restarted(stage: Stage, supervisor: Supervisor) -> None:
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


async def test_a_worker_that_can_never_start_ends_everything(stage: Stage, supervisor: Supervisor) -> None:
    running = await start(stage, supervisor)
    stage.lives["decode-0"][0].die(BadCheckpoint("no weights in there"))
    with pytest.raises(BadCheckpoint, match="no weights in there"):
        await running
    await supervisor.stop()
    assert len(stage.lives["decode-0"]) == 1
    assert stage.lives["prefill-0"][0].closed


async def test_a_bug_in_one_launch_is_counted_and_ends_no_other(stage: Stage, supervisor: Supervisor) -> None:
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


@pytest.mark.parametrize("serves", [True, False], ids=["that serves", "that loads"])
async def test_a_worker_that_runs_is_followed_and_not_launched(
    stage: Stage, supervisor: Supervisor, serves: bool
) -> None:
    life = Life("decode-0", 7)
    running = asyncio.create_task(supervisor.run(PLANS, running=adopted(life, serves=serves)))
    await stage.until("announce decode-0 h:5")
    await stage.until("launch prefill-0")
    assert stage.lives["decode-0"] == []
    assert supervisor.views["decode-0"].life.state is LifeState.SERVING
    assert ("decode-0 decode 0" in stage.starting_told) != serves, "one that serves is not announced as starting"
    life.die(WorkerLost("gone"))
    await stage.until("launch decode-0")
    assert stage.lives["decode-0"][0].incarnation > 7
    assert not running.done()


async def test_an_adopted_worker_is_queried_before_its_stream_speaks(stage: Stage, supervisor: Supervisor) -> None:
    """Ray, through which a stream comes, may be away for long."""

    async def silent() -> AsyncGenerator[Event, None]:
        await asyncio.Event().wait()
        yield Ended()

    life = Life("decode-0", 7)
    running = {"decode-0": replace(adopted(life, serves=True)["decode-0"], follow=silent)}
    task = asyncio.create_task(supervisor.run(PLANS, running=running))
    for _ in range(SupervisionConfig().max_failed_checks):
        stage.beats.put_nowait(WorkerLost("no answer"))
    await stage.until("launch decode-0")
    assert not task.done()


async def test_settings_that_once_served_are_kept_by_the_next_supervisor(stage: Stage, supervisor: Supervisor) -> None:
    await start(stage, supervisor, running={"decode-0": RunningWorker(has_served=True)})
    stage.lives["decode-0"][0].die(BadCheckpoint("the disk is away"))
    await stage.launched("decode-0", times=2)
