"""A supervisor whose desired state changes: workers come, go, and change their roles."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.supervision.supervisor import RunningWorker, Supervisor
from protos.errors import BadCheckpoint, WorkerLost
from protos.values import LaneAddress, WorkerInfo, WorkerRole
from router.fleet_owner import Revision
from tests.unit.cluster.supervision.staged_supervisor import (
    FLIPPED,
    LARGER,
    LAYOUT,
    PLANS,
    ROLES,
    Life,
    Stage,
    adopted,
    grown,
    serving,
    start,
)


async def test_growing_starts_new_workers_and_keeps_the_others(stage: Stage, supervisor: Supervisor) -> None:
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


async def test_a_worker_that_ends_during_its_drain_is_not_restarted(stage: Stage, supervisor: Supervisor) -> None:
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
    assert sorted([info.address for info in supervisor.serving().values()]) == [
        "decode-0:1",
        "decode-1:2",
        "prefill-0:1",
    ]


async def test_a_worker_that_cannot_start_is_given_up_alone(stage: Stage, supervisor: Supervisor) -> None:
    running = await serving(stage, supervisor)
    resizing = asyncio.create_task(supervisor.resize(LARGER))
    await stage.until("launch decode-1")
    stage.lives["decode-1"][0].die(BadCheckpoint("there is no such model"))
    with pytest.raises(BadCheckpoint, match="no such model"):
        await resizing
    await stage.until("withdraw decode-1")
    assert supervisor.plans == PLANS
    assert not running.done()


async def test_the_next_supervisor_finishes_a_drain(stage: Stage, supervisor: Supervisor) -> None:
    life = Life("decode-1", 7)
    info = WorkerInfo(
        worker_id="decode-1", incarnation=7, role=PLANS[1].role, model="m", address="h:5", layout=LAYOUT,
        lane=LaneAddress(worker_id="decode-1", incarnation=7, host="h", port=1), max_model_len=32, vocab_size=32,
    )  # fmt: skip
    running = {"decode-1": RunningWorker(has_served=True, incarnation=7, info=info, follow=life.events)}
    await start(stage, supervisor, leaving=LARGER[-1:], running=running)
    stage.lives["prefill-0"][0].serve("prefill-0:1")
    await stage.until("drain h:5")
    stage.drained.set()
    await stage.until("withdraw decode-1")
    assert life.closed
    assert "decode-1" not in stage.lives


# -- revisions ---------------------------------------------------------------------------------------------------------


async def test_a_revisions_last_worker_drains_after_its_answers(stage: Stage, supervisor: Supervisor) -> None:
    await serving(stage, supervisor)
    newer = tuple(replace(plan, revision=Revision(name="new")) for plan in LARGER[-1:])
    growing = asyncio.create_task(supervisor.resize((*PLANS, *newer)))
    await stage.until("launch decode-1")
    stage.lives["decode-1"][0].serve("decode-1:1")
    await growing
    stage.drained.set()
    rolling = asyncio.create_task(supervisor.resize(newer))
    for address in ("prefill-0:1", "decode-0:1"):
        await stage.until(f"retire {address}")
        assert f"drain {address}" not in stage.done
    stage.retired.set()
    await rolling
    assert {"drain prefill-0:1", "drain decode-0:1", "withdraw prefill-0", "withdraw decode-0"} <= set(stage.done)
    assert supervisor.views.keys() == {"decode-1"}


async def test_a_worker_with_others_of_its_revision_drains_at_once(stage: Stage, supervisor: Supervisor) -> None:
    await grown(stage, supervisor)
    stage.drained.set()
    await supervisor.resize(PLANS)
    assert "retire decode-1:1" not in stage.done


# -- roles -------------------------------------------------------------------------------------------------------------


async def test_a_worker_changes_its_role_without_another_start(stage: Stage, supervisor: Supervisor) -> None:
    running = await grown(stage, supervisor)
    flipping = asyncio.create_task(supervisor.resize(FLIPPED))
    await stage.until("decode-1:1 becomes prefill")
    assert not flipping.done()
    stage.flipped.set()
    await flipping
    info = supervisor.views["decode-1"].info
    assert info is not None
    assert info.role is WorkerRole.PREFILL
    assert len(stage.lives["decode-1"]) == 1
    assert not stage.lives["decode-1"][0].closed
    assert not running.done()


async def test_a_role_that_is_changed_back_is_not_waited_for(stage: Stage, supervisor: Supervisor) -> None:
    await grown(stage, supervisor)
    flipping = asyncio.create_task(supervisor.resize(FLIPPED))
    await stage.until("decode-1:1 becomes prefill")
    back = asyncio.create_task(supervisor.resize(LARGER))
    await flipping
    await stage.until("decode-1:1 becomes decode")
    stage.flipped.set()
    await back


async def test_a_worker_that_dies_during_a_flip_starts_in_its_new_role(stage: Stage, supervisor: Supervisor) -> None:
    await grown(stage, supervisor)
    flipping = asyncio.create_task(supervisor.resize(FLIPPED))
    await stage.until("decode-1:1 becomes prefill")
    stage.starting_told.clear()
    stage.lives["decode-1"][0].die(WorkerLost("killed"))
    await stage.launched("decode-1", times=2)
    assert "decode-1 prefill 0" in stage.starting_told
    stage.flipped.set()
    stage.lives["decode-1"][1].serve("decode-1:2")
    await flipping


async def test_an_adopted_worker_gets_the_role_it_was_to_have(stage: Stage, supervisor: Supervisor) -> None:
    life = Life("decode-0", 7)
    desired = [replace(PLANS[0], role=WorkerRole.DECODE), replace(PLANS[1], role=WorkerRole.PREFILL)]
    running = asyncio.create_task(supervisor.run(desired, running=adopted(life, serves=True)))
    await stage.until("launch prefill-0")
    stage.lives["prefill-0"][0].serve("prefill-0:1")
    await stage.until("h:5 becomes prefill")
    assert not running.done()


async def test_the_last_serving_worker_waits_for_another_to_serve(stage: Stage, supervisor: Supervisor) -> None:
    await serving(stage, supervisor)
    other = [replace(plan, worker_id=plan.worker_id.replace("0", "7")) for plan in PLANS]
    resizing = asyncio.create_task(supervisor.resize(other))
    for worker_id in other:
        await stage.until(f"launch {worker_id.worker_id}")
    await stage.until("drain prefill-0:1")
    assert "drain decode-0:1" not in stage.done
    ROLES.update({worker.worker_id: worker.role for worker in other})
    for worker_id in other:
        stage.lives[worker_id.worker_id][0].serve(f"{worker_id.worker_id}:1")
    stage.drained.set()
    await resizing
    assert len([line for line in stage.done if line.startswith("drain")]) == 2
