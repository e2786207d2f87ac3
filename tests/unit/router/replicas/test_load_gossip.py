"""Processes of one gateway hear at once what each has given to a worker, until the worker's own load shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from router.fleet.circuit_breaker import MAX_FAILURES
from router.fleet.fleet import Fleet
from router.prefix.index import NO_MATCH
from router.replicas.load_gossip import LoadGossip
from tests.unit.router.fake_cluster import Cluster, collect, job


def queued(fleet: Fleet) -> dict[str, int]:
    return {one.worker_id: one.queued_prefill_tokens for one in fleet.candidates(NO_MATCH, 1)}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: the path of a Unix socket has room for 107 bytes."""
    return tmp_path_factory.mktemp("s")


async def test_what_one_process_gives_to_a_worker_and_what_fails_there_counts_for_the_others(
    make: Callable[..., Cluster], folder: Path
) -> None:
    here, there = make(), make()
    await here.add("c0", "c1")
    for worker in here.workers.values():
        there.fleet.add_worker(worker.address, worker_id=worker.worker_id)
    await there.until(lambda: len(queued(there.fleet)) == 2)
    ends = [
        LoadGossip(
            folder=folder, number=number, count=2,
            take=cluster.fleet.given_elsewhere, blame=cluster.fleet.blame_elsewhere,
        )
        for number, cluster in enumerate((here, there))
    ]  # fmt: skip
    for end, cluster in zip(ends, (here, there), strict=True):
        await end.start()
        cluster.fleet.publish_load, cluster.fleet.publish_failure = end.tell, end.publish_failure
    heard = asyncio.Event()
    take = there.fleet.given_elsewhere
    ends[1]._take = lambda *told: (take(*told), heard.set())  # type: ignore[assignment]

    here["c0"].pause_after = 0
    asking = asyncio.create_task(collect(here, job()))
    await asyncio.wait_for(heard.wait(), 60)
    assert queued(there.fleet) == queued(here.fleet) == {"c0": 30, "c1": 0}

    here["c0"].go()
    await asking
    await there.until(lambda: queued(there.fleet)["c0"] == 0)

    blamed = asyncio.Event()
    blame = there.fleet.blame_elsewhere
    ends[1]._blame = lambda *told: (blame(*told), blamed.set())  # type: ignore[assignment]
    there.fleet.blame_elsewhere("c1", 2, MAX_FAILURES - 1)
    assert queued(there.fleet) == {"c0": 0, "c1": 0}
    here.fleet.blame(["c1"])
    await asyncio.wait_for(blamed.wait(), 60)
    assert queued(there.fleet) == {"c0": 0}, "the last of five failures was another sibling's"
    assert queued(here.fleet) == {"c0": 0, "c1": 0}
    for end in ends:
        await end.close()


async def test_what_a_worker_never_shows_is_forgotten(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.fleet.ELSEWHERE_S", 0.02)
    cluster = make()
    await cluster.add("c0")
    cluster.fleet.given_elsewhere("c0", 100, 4)
    cluster.fleet.given_elsewhere("nobody", 100, 4)
    assert queued(cluster.fleet) == {"c0": 100}
    async with asyncio.timeout(60):
        while queued(cluster.fleet)["c0"]:  # noqa: ASYNC110 - nobody is told of what is forgotten
            await asyncio.sleep(0.01)
