"""GPUs of workers that outlived Ray: the next Ray gives whichever it likes, and is asked until it gives theirs."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.cluster_config import RayConfig
from cluster.ray import shares as ray_shares
from cluster.ray.ray_session import Machines
from cluster.ray.shares import RayShares
from cluster.supervision.worker_placement import WorkerPlan
from protos.values import WorkerRole


class Gpus:
    """The GPUs that Ray has; a group takes the first free one."""

    def __init__(self, count: int) -> None:
        self.free = [str(number) for number in range(count)]
        self.taken: dict[int, str] = {}
        self.pinned = {"node:n1"}

    def take(self) -> int:
        group = len(self.taken) + 100
        self.taken[group] = self.free.pop(0) if self.free else ""
        return group


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Four of them."""
    has = Gpus(4)

    async def group(self: RayShares, bundles: list[dict[str, float]], name: str, strategy: str = "") -> int:
        assert [bundle["GPU"] for bundle in bundles] == [1.0]
        assert [bundle[name] for bundle in bundles for name in bundle.keys() & has.pinned] == [ray_shares.PINNED] * (
            " rank " in name
        )
        return has.take()

    async def ready_now(group: int) -> bool:
        return bool(has.taken[group])

    async def ready(group: int) -> None:
        assert has.taken[group]

    async def devices(group: int, bundles: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        return (has.taken[group],)

    async def remove(self: RayShares, groups: Sequence[int]) -> None:
        has.free = sorted([*has.free, *(has.taken[group] for group in groups if has.taken[group])])

    monkeypatch.setattr(RayShares, "_group", group)
    monkeypatch.setattr(RayShares, "_remove", remove)
    monkeypatch.setattr(ray_shares, "_ready", ready)
    monkeypatch.setattr(ray_shares, "_ready_now", ready_now)
    monkeypatch.setattr(ray_shares, "_devices", devices)
    return has


def of(num_ranks: int) -> WorkerPlan:
    return WorkerPlan(
        worker_id=f"decode-{num_ranks}", role=WorkerRole.DECODE, device="cuda", num_ranks=num_ranks, cpus_per_rank=1.0,
        gpus_per_rank=1, num_threads=1,
    )  # fmt: skip


@pytest.fixture
def shares(tmp_path: Path) -> RayShares:
    return RayShares(Machines(RayConfig(), tmp_path))


async def test_each_rank_gets_the_gpu_that_it_has(gpus: Gpus, shares: RayShares) -> None:
    assert await shares.take_devices(of(2), ("2", "0"), ("n1",) * 2)
    assert gpus.free == ["1", "3"], "what others may use is free again"
    assert await shares.take_devices(of(1), ("3",), ("n1",))
    assert gpus.free == ["1"]
    await shares.give_back("decode-2")
    assert gpus.free == ["0", "1", "2"]


async def test_ranks_on_two_machines_have_gpus_of_one_name(gpus: Gpus, shares: RayShares) -> None:
    """Each machine counts its GPUs from 0."""
    gpus.pinned, gpus.free = {"node:n1", "node:n2"}, ["0", "0", "1"]
    assert await shares.take_devices(of(2), ("0", "0"), ("n1", "n2"))
    assert gpus.free == ["1"]


async def test_a_gpu_that_others_have_taken_is_said_to_be_missing(gpus: Gpus, shares: RayShares) -> None:
    gpus.free.remove("3")
    assert not await shares.take_devices(of(1), ("3",), ("n1",))
    assert gpus.free == ["0", "1", "2"]


async def test_a_worker_ending_during_gpu_reservation_has_one_share(gpus: Gpus, shares: RayShares) -> None:
    gpus.free = ["3"]
    for _ in range(2):
        assert tuple(await asyncio.gather(shares.take_devices(of(1), ("3",), ("n1",)), shares.take(of(1)))) == (
            True,
            ("3",),
        )
    await shares.give_back("decode-1")
    assert gpus.free == ["3"]
    assert tuple(await asyncio.gather(shares.take(of(1)), shares.take_devices(of(1), ("3",), ("n1",)))) == (
        ("3",),
        True,
    )
    await shares.give_back("decode-1")
    assert gpus.free == ["3"]


async def test_a_gpu_released_during_reservation_is_free(
    gpus: Gpus, shares: RayShares, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def devices(group: int, bundles: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        await shares.give_back("decode-1")
        return (gpus.taken[group],)

    monkeypatch.setattr(ray_shares, "_devices", devices)
    assert not await shares.take_devices(of(1), ("3",), ("n1",))
    assert gpus.free == ["0", "1", "2", "3"]


async def test_a_group_that_ray_makes_for_a_cancelled_call_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups, begun, may_end, loop = [], asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def make(bundles: object, strategy: str, name: str) -> int:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(60)
        groups.append(1)
        return 1

    placement = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(placement, "placement_group", make)
    monkeypatch.setattr(placement, "remove_placement_group", groups.remove)
    machines = Machines(RayConfig(), tmp_path)
    taking = asyncio.create_task(RayShares(machines).take(of(1)))
    async with asyncio.timeout(60):
        await begun.wait()
        taking.cancel()
        await asyncio.wait([taking], timeout=0.05)
        may_end.set()
        await asyncio.wait([taking])
        await machines.call(lambda: None)
    assert taking.cancelled()
    assert not groups


async def test_nodes_are_let_report_where_a_worker_waits_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray's head counted as used what was free since a node was lost: the worker waited forever."""
    reported = asyncio.Event()

    async def group(self: RayShares, bundles: list[dict[str, float]], name: str, strategy: str) -> int:
        return 1

    async def ready(group: int) -> None:
        await reported.wait()

    async def let_report(self: RayShares, bundle: Mapping[str, float]) -> None:
        reported.set()

    monkeypatch.setattr(RayShares, "_group", group)
    monkeypatch.setattr(ray_shares, "_ready", ready)
    monkeypatch.setattr(ray_shares, "REPORT_S", 0.01)
    monkeypatch.setattr(RayShares, "_let_nodes_report", let_report)
    async with asyncio.timeout(60):
        shares = RayShares(Machines(RayConfig(address="ray://head:10001"), tmp_path))
        assert await shares.take(replace(of(1), gpus_per_rank=0)) == ()
