"""The gateway's view of a fleet that sleeps."""

from __future__ import annotations

import asyncio

import pytest

from protos.errors import Unavailable
from protos.values import WorkerRole
from router.fleet.sleep import FleetSleep, SleepWatch
from router.fleet_owner import DesiredFleet, FleetChange, FleetOrder, FleetReport, OrderKind

ASLEEP = FleetReport(desired=DesiredFleet(counts={WorkerRole.COLOCATED: 0}), serving={}, start_s=12.0)
AWAKE = FleetReport(desired=DesiredFleet(counts={WorkerRole.COLOCATED: 2}), serving={}, start_s=12.0)


class EmptyFleet:
    """A fleet without workers."""

    def __init__(self) -> None:
        self.sleep = FleetSleep()

    def ready(self) -> bool:
        return False

    def status(self) -> tuple[()]:
        return ()


class SleepingOwner:
    """Counts orders; wakes up with the first."""

    def __init__(self) -> None:
        self.orders: list[FleetOrder] = []
        self.ordered = asyncio.Event()
        self.viewed = asyncio.Event()

    async def view(self) -> FleetReport:
        self.viewed.set()
        return AWAKE if self.orders else ASLEEP

    async def order(self, order: FleetOrder) -> FleetChange:
        self.orders.append(order)
        self.ordered.set()
        return FleetChange(
            number=1,
            kind=order.kind,
            who=order.who,
            why=order.why,
            before=ASLEEP.desired,
            after=AWAKE.desired,
            at_s=0.0,
        )

    async def close(self) -> None:
        pass


def test_the_estimate_is_a_measured_start_less_its_age() -> None:
    sleep = FleetSleep()
    assert (sleep.may_serve, sleep.describe(0.0)) == (False, "")
    sleep.learn(ASLEEP, 0.0)
    assert sleep.describe(5.0).endswith("and is served in about 12 s")
    sleep.learn(AWAKE, 10.0)
    assert (sleep.may_serve, sleep.expected_s(14.0)) == (True, 8.0)
    assert sleep.describe(14.0) == "the fleet wakes up: a worker is expected in about 8 s"
    sleep.awake()
    assert (sleep.may_serve, sleep.describe(20.0)) == (False, "")


def watch(fleet: EmptyFleet, owner: SleepingOwner) -> asyncio.Task[None]:
    """Starts a watch, which uses no more of a fleet than this one has."""
    return asyncio.create_task(SleepWatch(fleet.sleep, fleet, owner).run())  # type: ignore[arg-type]


async def test_a_sleeping_fleet_is_woken_once_by_a_waiting_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.sleep.LOOK_S", 0.001)
    fleet, owner = EmptyFleet(), SleepingOwner()
    watching = watch(fleet, owner)
    await owner.viewed.wait()
    assert owner.orders == []
    fleet.sleep.wanted.set()
    await owner.ordered.wait()
    fleet.sleep.wanted.set()  # the job tries again
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert [order.kind for order in owner.orders] == [OrderKind.WAKE]
    assert fleet.sleep.may_serve
    watching.cancel()


async def test_an_owner_that_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.sleep.LOOK_S", 0.001)
    fleet, owner = EmptyFleet(), SleepingOwner()
    failures = [Unavailable("away")]

    async def view() -> FleetReport:
        if failures:
            raise failures.pop()
        return ASLEEP

    monkeypatch.setattr(owner, "view", view)
    fleet.sleep.wanted.set()
    watching = watch(fleet, owner)
    await owner.ordered.wait()
    watching.cancel()


async def test_a_wake_that_fails_is_logged_and_ordered_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.fleet.sleep.LOOK_S", 0.001)
    fleet, owner = EmptyFleet(), SleepingOwner()
    order, failures = owner.order, [Unavailable("no supervisor"), Unavailable("no supervisor")]

    async def failing(wake: FleetOrder) -> FleetChange:
        if failures:
            raise failures.pop()
        return await order(wake)

    monkeypatch.setattr(owner, "order", failing)
    fleet.sleep.wanted.set()
    watching = watch(fleet, owner)
    async with asyncio.timeout(60):
        await owner.ordered.wait()
    watching.cancel()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["the fleet sleeps on, and is woken again in 0.0 s: no supervisor"]
