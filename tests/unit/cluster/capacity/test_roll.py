"""Rolls: the steps of one as values, and the owner that takes them over an actuator which does what the test says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from cluster.capacity.controller import FleetController, FleetRecord, continued
from cluster.capacity.roll import RollMix, next_mix
from protos.errors import BadCheckpoint, InvalidRequest, Misconfigured
from protos.values import WorkerRole
from router.fleet_owner import ChangeState, DesiredFleet, FleetChange, FleetOrder, OrderKind, Revision
from tests.unit.cluster.capacity.staged_fleet import CONFIGURED, DECODE, PREFILL, StagedFleet, flip, scale

NEW = Revision(name="new", model="/models/new")
THIRD = Revision(name="third", model="/models/third")
OLD = Revision()
COLOCATED = WorkerRole.COLOCATED
ROLL = FleetOrder(kind=OrderKind.ROLL, model="/models/new", who="ann")
ABORT = FleetOrder(kind=OrderKind.ABORT, who="bob")


def revise(current: Revision, order: FleetOrder) -> Revision:
    if order.model == "/models/none":
        raise Misconfigured("worker.dtype = 'f8': choose one of auto, bfloat16, float32", param="dtype")
    return {NEW.model: NEW, THIRD.model: THIRD}.get(order.model, OLD if not order.model else current)


def owner_of(fleet: StagedFleet, configured: DesiredFleet = CONFIGURED) -> FleetController:
    return FleetController(fleet, configured, revise=revise, origin="o")


@pytest.fixture
async def fleet() -> StagedFleet:
    return StagedFleet()


@pytest.fixture
async def owner(fleet: StagedFleet) -> FleetController:
    return owner_of(fleet)


async def begun(fleet: StagedFleet, times: int) -> None:
    """Returns when the actuator has been called so often."""
    async with asyncio.timeout(60):
        while len(fleet.begun) < times:  # noqa: ASYNC110 - the staged fleet notifies nobody
            await asyncio.sleep(0)


async def ended(owner: FleetController, fleet: StagedFleet, number: int) -> FleetChange:
    """The change, after all its steps were reached."""
    waiting = asyncio.create_task(owner.ended(number))
    async with asyncio.timeout(60):
        while not waiting.done():
            if not fleet.begun[-1].done():
                fleet.arrive()
            await asyncio.sleep(0)
    return waiting.result()


@pytest.mark.parametrize("surge", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "counts", [{COLOCATED: 3}, {PREFILL: 1, DECODE: 3}, {PREFILL: 4, DECODE: 2}, {PREFILL: 0, DECODE: 2}]
)
def test_each_step_of_a_roll_keeps_both_pools_serving(counts: dict[WorkerRole, int], surge: int) -> None:
    last = RollMix(newer=dict.fromkeys(counts, 0), older=dict(counts))
    while (mix := next_mix(last, counts, surge)) is not None:
        starts, ends = mix.newer != last.newer, mix.older != last.older
        assert starts != ends, "a step starts workers or ends some"
        for role, count in counts.items():
            both = mix.newer[role] + mix.older[role]
            assert both <= count + surge
            assert both > 0 or not count or (role is PREFILL and not surge), (
                "a pool without a surge may have one worker"
            )
            if surge and count and mix.older != dict.fromkeys(counts, 0):
                assert mix.older[role] > 0, "the older revision serves with both pools until its end"
        assert any(mix.newer[role] + mix.older[role] for role in counts if role is not PREFILL)
        last = mix
    assert last == RollMix(newer=dict(counts), older=dict.fromkeys(counts, 0))


async def test_a_roll_ends_with_the_new_revision(fleet: StagedFleet, owner: FleetController) -> None:
    change = await owner.order(ROLL)
    assert (change.after, str(change.after)) == (
        replace(CONFIGURED, revision=NEW), "1 prefill + 2 decode at revision new (model /models/new)",
    )  # fmt: skip
    progress = (await owner.view()).rolling
    assert progress is not None
    assert (progress.number, progress.to, progress.newer) == (1, NEW, {PREFILL: 0, DECODE: 0})
    assert (await ended(owner, fleet, 1)).state is ChangeState.REACHED
    assert fleet.mixes == [
        ("new", {PREFILL: 1, DECODE: 1}, {PREFILL: 1, DECODE: 2}),
        ("new", {PREFILL: 1, DECODE: 1}, {PREFILL: 1, DECODE: 1}),
        ("new", {PREFILL: 1, DECODE: 2}, {PREFILL: 1, DECODE: 1}),
        ("new", {PREFILL: 1, DECODE: 2}, {PREFILL: 0, DECODE: 0}),
    ]
    assert ((await owner.view()).rolling, owner.desired.revision) == (None, NEW)
    assert (await owner.order(ROLL)).number == 0, "it is so already"
    await owner.order(scale(decode=3))
    assert owner.desired == DesiredFleet(counts={PREFILL: 1, DECODE: 3}, revision=NEW), "a later change keeps it"


async def test_a_worker_that_can_never_start_takes_the_roll_back(fleet: StagedFleet, owner: FleetController) -> None:
    await owner.order(ROLL)
    fleet.begun[-1].set_exception(BadCheckpoint("no config.json"))
    change = await ended(owner, fleet, 1)
    assert (change.state, change.reason) == (ChangeState.FAILED, "no config.json")
    assert fleet.mixes[1:] == [("", {PREFILL: 1, DECODE: 2}, {PREFILL: 0, DECODE: 0})]
    assert owner.desired == CONFIGURED


async def test_an_abort_goes_back_from_where_the_roll_is(fleet: StagedFleet) -> None:
    owner = await half_rolled(fleet)
    change = await owner.order(ABORT)
    aborted = await owner.ended(1)
    assert (aborted.state, aborted.reason) == (ChangeState.REPLACED, "bob aborts it with change 2")
    assert (await ended(owner, fleet, change.number)).state is ChangeState.REACHED
    assert fleet.mixes[3:] == [
        ("", {PREFILL: 1, DECODE: 1}, {PREFILL: 1, DECODE: 1}),
        ("", {PREFILL: 1, DECODE: 2}, {PREFILL: 1, DECODE: 1}),
        ("", {PREFILL: 1, DECODE: 2}, {PREFILL: 0, DECODE: 0}),
    ]
    assert owner.desired == CONFIGURED
    with pytest.raises(InvalidRequest, match="no roll is under way"):
        await owner.order(ABORT)


@pytest.mark.parametrize("is_aborted", [True, False])
async def test_a_failed_way_back_ends_with_its_reason(
    fleet: StagedFleet, owner: FleetController, is_aborted: bool
) -> None:
    change = await owner.order(ROLL)
    if is_aborted:
        change = await owner.order(ABORT)
    else:
        fleet.begun[-1].set_exception(BadCheckpoint("no config.json"))
    await begun(fleet, 2)
    fleet.begun[-1].set_exception(BadCheckpoint("the former folder is gone"))
    ended_change = await ended(owner, fleet, change.number)
    assert ended_change.state is ChangeState.FAILED
    first = "" if is_aborted else "no config.json; "
    assert ended_change.reason == f"{first}the way back fails: the former folder is gone"
    assert [revision for revision, _, _ in fleet.mixes] == ["new", ""]
    assert ((await owner.view()).rolling, owner.desired.revision) == (None, Revision())


async def half_rolled(fleet: StagedFleet) -> FleetController:
    """1 + 1 workers of each revision are there."""
    owner = owner_of(fleet)
    await owner.order(ROLL)
    for times in (1, 2):
        await begun(fleet, times)
        fleet.arrive()
    await begun(fleet, 3)
    return owner


async def stuck_owner(fleet: StagedFleet) -> FleetController:
    """Its roll has failed in the middle, and its way back, too."""
    owner = await half_rolled(fleet)
    fleet.begun[-1].set_exception(BadCheckpoint("no config.json"))
    await begun(fleet, 4)
    fleet.begun[-1].set_exception(BadCheckpoint("the former folder is gone"))
    assert (await ended(owner, fleet, 1)).state is ChangeState.FAILED
    return owner


async def test_the_fleet_is_reported_after_a_failed_way_back(fleet: StagedFleet) -> None:
    owner = await stuck_owner(fleet)
    assert owner.desired == CONFIGURED, "what should be there"
    progress = (await owner.view()).rolling
    assert progress is not None
    assert (progress.newer, progress.older) == ({PREFILL: 1, DECODE: 1}, {PREFILL: 1, DECODE: 1})
    with pytest.raises(
        InvalidRequest, match=r"change 1 did not get back to the former revision.*`baton roll --abort` or"
    ):
        await owner.order(flip("decode-0", PREFILL))


@pytest.mark.parametrize("order", [ABORT, scale(prefill=1, decode=2), replace(ROLL, model="")], ids=str)
async def test_a_way_back_that_failed_is_tried_again(fleet: StagedFleet, order: FleetOrder) -> None:
    owner = await stuck_owner(fleet)
    num_steps = len(fleet.mixes)
    change = await owner.order(order)
    assert (await ended(owner, fleet, change.number)).state is ChangeState.REACHED
    assert {revision for revision, _, _ in fleet.mixes[num_steps:]} == {""}
    assert fleet.mixes[-1] == ("", {PREFILL: 1, DECODE: 2}, {PREFILL: 0, DECODE: 0})
    assert ((await owner.view()).rolling, owner.desired) == (None, CONFIGURED)


@pytest.mark.parametrize(("model", "name"), [("/models/new", "new"), ("/models/third", "third")])
async def test_a_roll_replaces_the_workers_of_both_revisions(fleet: StagedFleet, model: str, name: str) -> None:
    owner = await stuck_owner(fleet)
    num_steps = len(fleet.mixes)
    change = await owner.order(replace(ROLL, model=model))
    assert (await ended(owner, fleet, change.number)).state is ChangeState.REACHED
    assert {revision for revision, _, _ in fleet.mixes[num_steps:]} == {name}
    assert fleet.mixes[-1] == (name, {PREFILL: 1, DECODE: 2}, {PREFILL: 0, DECODE: 0})
    assert ((await owner.view()).rolling, owner.desired.revision.name) == (None, name)


async def test_a_way_back_without_room_ends_with_fewer_workers(fleet: StagedFleet) -> None:
    """A node was lost meanwhile: `baton scale` was refused, and so was a second abort."""
    owner = await half_rolled(fleet)
    fleet.most = 3
    change = await owner.order(ABORT)
    with pytest.raises(InvalidRequest, match=r"change 2 takes the fleet back.*`baton scale` to fewer workers"):
        await owner.order(ABORT)
    with pytest.raises(InvalidRequest, match=r"change 2 takes the fleet back"):
        await owner.order(flip("decode-0", PREFILL))
    smaller = await owner.order(scale(decode=1))
    assert (await owner.ended(change.number)).state is ChangeState.REPLACED
    assert (await ended(owner, fleet, smaller.number)).state is ChangeState.REACHED
    assert owner.desired == DesiredFleet(counts={PREFILL: 1, DECODE: 1})
    assert fleet.mixes[-1] == ("", {PREFILL: 1, DECODE: 1}, {PREFILL: 0, DECODE: 0})


async def test_a_bug_in_a_step_takes_the_roll_back(fleet: StagedFleet, owner: FleetController) -> None:
    await owner.order(ROLL)
    fleet.begun[-1].set_exception(KeyError("worker"))
    change = await ended(owner, fleet, 1)
    assert (change.state, change.reason) == (ChangeState.FAILED, "KeyError: 'worker'")
    assert (await owner.order(scale(decode=3))).number == 2


async def test_other_orders_wait_for_the_end_of_a_roll(fleet: StagedFleet, owner: FleetController) -> None:
    await owner.order(ROLL)
    with pytest.raises(InvalidRequest, match="change 1 rolls the fleet: wait for its end, or `baton roll --abort`"):
        await owner.order(scale(decode=3))
    with pytest.raises(InvalidRequest, match="change 1 rolls the fleet: wait for its end"):
        await owner.order(ROLL)
    await ended(owner, fleet, 1)
    assert (await owner.order(scale(decode=3))).number == 2


async def test_an_impossible_roll_names_the_fault_and_changes_nothing(
    fleet: StagedFleet, owner: FleetController
) -> None:
    fleet.most = 3
    with pytest.raises(InvalidRequest, match=r"5 GPUs, and there are 3\..*`--surge 0` ends one first"):
        await owner.order(ROLL)
    with pytest.raises(InvalidRequest, match=r"worker\.dtype = 'f8'"):
        await owner.order(replace(ROLL, model="/models/none"))
    with pytest.raises(InvalidRequest, match="there is 1 decode worker: give a surge of 1, or `baton scale decode=2`"):
        await owner_of(fleet, DesiredFleet(counts={PREFILL: 1, DECODE: 1})).order(replace(ROLL, surge=0))
    with pytest.raises(InvalidRequest, match="were started by others"):
        await FleetController(fleet, CONFIGURED).order(ROLL)
    assert (owner.desired, owner.changes, (await owner.view()).rolling) == (CONFIGURED, (), None)


async def test_a_fleet_that_sleeps_wakes_with_the_revision(fleet: StagedFleet, owner: FleetController) -> None:
    await owner.order(scale(prefill=0, decode=0))
    fleet.arrive()
    await ended(owner, fleet, (await owner.order(ROLL)).number)
    woken = await owner.order(FleetOrder(kind=OrderKind.WAKE))
    assert (woken.after.counts, woken.after.revision) == (CONFIGURED.counts, NEW)


async def test_the_next_owner_keeps_the_reached_revision(fleet: StagedFleet, owner: FleetController) -> None:
    await owner.order(ROLL)
    under_way = FleetRecord(configured=CONFIGURED, desired=owner.desired, changes=tuple(owner.changes), origin="o")
    again = continued(msgspec.json.decode(msgspec.json.encode(under_way), type=FleetRecord), CONFIGURED, "o")
    assert again is not None
    assert again.desired == CONFIGURED, "a roll that was not complete"
    assert (again.changes[-1].state, again.changes[-1].reason) == (
        ChangeState.FAILED, "its owner has ended before it had; the next one began with the former revision",
    )  # fmt: skip
    await ended(owner, fleet, 1)
    reached = replace(under_way, desired=owner.desired, changes=tuple(owner.changes))
    after, other = continued(reached, CONFIGURED, "o"), continued(reached, CONFIGURED, "other settings")
    assert after is not None
    assert other is not None
    assert (after.desired.revision, other.desired.revision) == (NEW, Revision())
