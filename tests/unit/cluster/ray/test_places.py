"""The places of workers, while Ray comes and goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.ray.hosts import TakenShare
from cluster.ray.places import Places
from cluster.supervision.living import LivingWorker
from cluster.supervision.worker_placement import WorkerPlan
from protos.errors import Unavailable
from protos.values import WorkerRole

PLAN = WorkerPlan(
    worker_id="decode-0", role=WorkerRole.DECODE, device="cuda", num_ranks=1, cpus_per_rank=1.0, gpus_per_rank=1,
    num_threads=1,
)  # fmt: skip
OTHER = replace(PLAN, worker_id="decode-1")


class Driver:
    """Answers calls with what the test has prepared for their method."""

    fault = ""
    is_up = True

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = answers
        self.calls: list[tuple[object, ...]] = []

    async def call(self, method: str, *arguments: object, kind: object) -> Any:
        self.calls.append((method, *arguments))
        answer = self._answers[method].pop(0) if self._answers.get(method) else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def living(address: str) -> LivingWorker:
    return LivingWorker(
        worker_id="decode-0", incarnation=7, hosts=(address,), devices=("3",), names=("decode-0.7.0",), pids=(9,)
    )


async def test_a_worker_keeps_its_place_on_this_machine() -> None:
    driver: Any = Driver(take=[TakenShare(devices=("3",))])
    here: Any = object()
    places = Places(driver, here, 60.0)
    first = await places.take(PLAN)
    await places.give_back(PLAN)
    assert await places.take(PLAN) == first
    assert (first.hosts, first.devices) == ((here,), ("3",))
    assert [call[0] for call in driver.calls] == ["take"]
    await places.release("decode-0")
    assert driver.calls[-1] == ("give_back", "decode-0")


async def test_the_next_ray_is_asked_for_a_place_when_one_is_lost() -> None:
    class Lost(Driver):
        async def call(self, method: str, *arguments: object, kind: object) -> Any:
            self.is_up = len(self.calls) > 0
            return await super().call(method, *arguments, kind=kind)

    driver: Any = Lost(take=[Unavailable("Ray was lost"), TakenShare(devices=("3",), hosts=("n1",))])
    place = await Places(driver, None, 60.0).take(PLAN)
    assert [host.address for host in place.hosts] == ["n1"]


async def test_a_node_is_left_when_no_worker_is_on_it_any_more() -> None:
    driver: Any = Driver(take=[TakenShare(devices=("0",), hosts=("n1",)), TakenShare(devices=("1",), hosts=("n1",))])
    places = Places(driver, None, 60.0)
    await places.take(PLAN)
    await places.take(OTHER)
    await places.release("decode-0")
    assert ("leave", "n1") not in driver.calls
    await places.release("decode-1")
    assert ("leave", "n1") in driver.calls


@pytest.mark.parametrize("answer", [False, Unavailable("no such group")])
async def test_a_worker_serves_on_if_ray_cannot_reserve_its_place(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The others' were not set aside, and no line said so."""
    driver: Any = Driver(keep=[answer, True])
    places = Places(driver, None, 60.0)
    await places.retake(PLAN, living("n1"))
    await places.keep((PLAN, OTHER))
    assert ("keep", PLAN, TakenShare(devices=("3",), hosts=("n1",))) in driver.calls
    assert "worker decode-0: Ray could not reserve what it has (GPUs: 3)" in caplog.text


async def test_nothing_is_reserved_for_a_worker_that_has_ended() -> None:
    driver: Any = Driver(keep=[True])
    places = Places(driver, None, 60.0)
    await places.retake(PLAN, living("n1"))
    driver.is_up = False
    await places.give_back(PLAN)
    driver.is_up = True
    await places.keep((PLAN,))
    await places.release("decode-0")
    assert driver.calls == [("leave", "n1"), ("give_back", "decode-0")]


async def test_no_places_are_reserved_once_ray_is_lost() -> None:
    driver: Any = Driver(keep=[Unavailable("Ray was lost"), True])
    places = Places(driver, None, 60.0)
    await places.retake(PLAN, living("n1"))
    await places.retake(OTHER, living("n1"))
    driver.is_up = False
    with pytest.raises(Unavailable):
        await places.keep((PLAN, OTHER))
    assert len(driver.calls) == 1
