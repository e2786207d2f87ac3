"""Claims of a rank on its host are free again when its start fails."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from cluster.supervision.rank import Ended, LocalRank, RankSpec
from protos.errors import Misconfigured
from protos.values import WorkerRole
from workers.cores import Core, Cores
from workers.worker_config import RankId, WorkerConfig

CORE = Core(cpu=min(os.sched_getaffinity(0)), node=0)
ORDERS = RankSpec(
    role=WorkerRole.DECODE, worker=WorkerConfig(model="m"),
    rank_id=RankId(worker_id="d0", incarnation=1),
)  # fmt: skip


@pytest.mark.parametrize("stopped", [False, True], ids=["fails", "stopped"])
async def test_cores_are_given_back_when_nothing_is_opened(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on, released = threading.Event(), threading.Event(), asyncio.Event()

    class Watched(Cores):
        def release(self) -> None:
            super().release()
            released.set()

    def claim(orders: RankSpec) -> Cores:
        cores = Watched(tmp_path)
        assert cores.claim([CORE], 1) == (CORE.cpu,)
        return cores

    def open_worker(*_: object) -> None:
        opening.set()
        assert go_on.wait(60)
        if not stopped:
            raise Misconfigured("no such model", param="model")

    monkeypatch.setattr("cluster.supervision.rank._claim", claim)
    monkeypatch.setattr("cluster.supervision.rank._open_worker", open_worker)
    rank = LocalRank()
    rank.start(ORDERS)
    assert await asyncio.to_thread(opening.wait, 60)
    if stopped:
        await rank.stop()
        assert not Cores(tmp_path).claim([CORE], 1), "the thread that opens still computes there"
    go_on.set()
    (ended,) = await rank.news()
    assert isinstance(ended, Ended)
    assert (ended.error is None) == stopped
    await asyncio.wait_for(released.wait(), 60)
    assert Cores(tmp_path).claim([CORE], 1) == (CORE.cpu,)
