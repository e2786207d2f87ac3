"""The owner of the desired fleet over an actuator that does what the test says."""

from __future__ import annotations

import msgspec
import pytest

from cluster.capacity.controller import FleetController, FleetRecord, continued
from protos.errors import BadCheckpoint, InvalidRequest
from protos.values import WorkerRole
from router.fleet_owner import RING_SIZE, ChangeState, DesiredFleet, FleetOrder, OrderKind
from tests.unit.cluster.capacity.staged_fleet import CONFIGURED, DECODE, PREFILL, StagedFleet, flip, scale


class KeptRecords:
    def __init__(self) -> None:
        self.records: list[FleetRecord] = []

    def save(self, record: FleetRecord) -> None:
        self.records.append(record)


async def test_a_change_says_who_why_from_to_and_how_it_ended() -> None:
    fleet, times = StagedFleet(), iter(range(100, 200))
    owner = FleetController(fleet, CONFIGURED, wall_clock=lambda: next(times))
    change = await owner.order(scale(decode=3))
    assert (change.number, change.who, change.why, change.at_s) == (1, "ann", "load", 100)
    assert (change.before, change.after) == (CONFIGURED, DesiredFleet(counts={PREFILL: 1, DECODE: 3}))
    report = await owner.view()
    assert (report.waiting_for, report.serving) == (("decode-2 to serve",), {PREFILL: 1, DECODE: 2})
    fleet.arrive()
    ended = await owner.ended(1)
    assert (ended.state, ended.ended_s) == (ChangeState.REACHED, 101)
    assert (await owner.view()).reached


async def test_a_flip_moves_one_of_the_counts_to_the_other() -> None:
    fleet = StagedFleet()
    owner = FleetController(fleet, CONFIGURED)
    change = await owner.order(flip("decode-1", PREFILL))
    assert (change.worker_id, change.after.counts) == ("decode-1", {PREFILL: 2, DECODE: 1})
    assert (await owner.view()).waiting_for == ("decode-1 to change from decode to prefill",)
    fleet.arrive()
    assert (await owner.ended(1)).state is ChangeState.REACHED
    await owner.order(flip("decode-1", DECODE))
    assert owner.desired == CONFIGURED


async def test_a_later_change_replaces_the_one_under_way() -> None:
    fleet = StagedFleet()
    owner = FleetController(fleet, CONFIGURED)
    await owner.order(scale(decode=3))
    await owner.order(scale(decode=4))
    assert (await owner.ended(1)).state is ChangeState.REPLACED
    fleet.arrive()
    assert (await owner.ended(2)).state is ChangeState.REACHED


async def test_a_worker_that_cannot_start_fails_the_change() -> None:
    fleet = StagedFleet()
    owner = FleetController(fleet, CONFIGURED)
    await owner.order(scale(decode=3))
    del fleet.desired["decode-2"]
    fleet.begun[-1].set_exception(BadCheckpoint("no weights in there"))
    ended = await owner.ended(1)
    assert (ended.state, ended.reason) == (ChangeState.FAILED, "no weights in there")
    assert owner.desired == CONFIGURED


async def test_an_order_beyond_the_machines_is_refused() -> None:
    owner = FleetController(StagedFleet(), CONFIGURED)
    with pytest.raises(InvalidRequest, match="11 GPUs, and there are 8"):
        await owner.order(scale(decode=10))
    assert (owner.desired, owner.changes) == (CONFIGURED, ())


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            scale(colocated=2),
            "colocated=2: this cluster has no colocated pool, it has prefill and decode: use `baton scale prefill=2 "
            "decode=2`, or start another cluster with `baton serve --workers 2`",
        ),
        (scale(decode=0), "decode=0: give 1 to 4096"),
        (scale(prefill=5000), "prefill=5000: give 0 to 4096"),
        (flip("decode-7", PREFILL), "there is no worker decode-7: the fleet is prefill-0, decode-0, decode-1"),
        (flip("prefill-0", PREFILL), "prefill-0 is a prefill worker already"),
        (flip("decode-0", WorkerRole.COLOCATED), "decode-0 is a decode worker and cannot become a colocated worker"),
    ],
)
async def test_an_impossible_order_names_the_fault(order: FleetOrder, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await FleetController(StagedFleet(), CONFIGURED).order(order)


async def test_the_only_decode_worker_keeps_its_role() -> None:
    fleet = StagedFleet()
    owner = FleetController(fleet, CONFIGURED)
    await owner.order(scale(decode=1))
    with pytest.raises(InvalidRequest, match=r"decode-0 is the only decode worker.*`baton scale decode=2`"):
        await owner.order(flip("decode-0", PREFILL))


async def test_an_order_for_the_present_fleet_changes_nothing() -> None:
    owner = FleetController(StagedFleet(), CONFIGURED)
    assert (await owner.order(scale(decode=2))).number == 0
    assert owner.changes == ()


async def test_the_ring_keeps_the_latest_changes() -> None:
    fleet = StagedFleet()
    owner = FleetController(fleet, CONFIGURED)
    for number in range(RING_SIZE + 3):
        await owner.order(scale(decode=3 + number % 2))
        fleet.arrive()
    assert [change.number for change in owner.changes] == list(range(4, RING_SIZE + 4))
    assert (await owner.ended(RING_SIZE + 3)).state is ChangeState.REACHED


async def test_the_record_outlives_its_owner_unless_settings_change() -> None:
    records = KeptRecords()
    owner = FleetController(StagedFleet(), CONFIGURED, store=records)
    await owner.order(scale(decode=3))
    packed = msgspec.json.encode(records.records[-1])
    record = continued(msgspec.json.decode(packed, type=FleetRecord), CONFIGURED)
    assert record is not None
    later = FleetController(StagedFleet(), CONFIGURED, record=record)
    assert later.desired.counts == {PREFILL: 1, DECODE: 3}
    assert [(change.who, change.state) for change in later.changes] == [("ann", ChangeState.REACHED)]
    assert continued(record, DesiredFleet(counts={PREFILL: 2, DECODE: 2})) is None, "the operator has written another"


async def test_a_fleet_that_sleeps_wakes_as_it_was() -> None:
    fleet = StagedFleet()
    owner = FleetController(fleet, CONFIGURED)
    await owner.order(scale(decode=3))
    await owner.order(scale(prefill=0, decode=0))
    assert owner.desired.is_asleep
    wake = FleetOrder(kind=OrderKind.WAKE, who="a request")
    assert (await owner.order(wake)).after.counts == {PREFILL: 1, DECODE: 3}
    assert (await owner.order(wake)).number == 0, "it is awake"
