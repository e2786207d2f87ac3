"""A worker changes its role while clients read: the same tokens, the same weights, the same cached blocks.

Real gRPC and real lanes in one process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.supervision.health import WorkerCalls
from cluster.supervision.rank import next_roles
from decode_pool.decode_role import DecodeRole
from prefill_pool.prefill_role import PrefillRole
from protos.errors import InvalidRequest
from protos.values import WorkerRole
from router.fleet.channels import open_channel
from tests.cluster.test_draining import Cluster, ask_all, checkpoint, cluster_of

pytestmark = pytest.mark.cluster
__all__ = ["checkpoint"]


def may_flip(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker._role_change._roles = next_roles(worker._parts.engine)  # type: ignore[union-attr]


async def flip(cluster: Cluster, worker_id: str, role: WorkerRole) -> None:
    await WorkerCalls(open_channel).change_role(cluster.workers[worker_id].info.address, role)
    clock = asyncio.get_running_loop().time
    while {worker.worker_id: worker.info.role for worker in cluster.fleet.status() if worker.info}[
        worker_id
    ] is not role:
        await cluster.fleet.offers.wait(until=clock() + 30)


async def test_a_flip_under_streams_changes_no_token(checkpoint: Path) -> None:
    async with cluster_of(checkpoint, "prefill-0", "decode-0", "decode-1") as cluster:
        may_flip(cluster)
        undisturbed = [await client.answer() for client in await ask_all(cluster)]
        worker = cluster.workers["decode-1"]
        for role, kind in ((WorkerRole.PREFILL, PrefillRole), (WorkerRole.DECODE, DecodeRole)):
            clients = await ask_all(cluster)
            num_cached = len(list(worker._parts.engine.pool.snapshot()))
            await flip(cluster, "decode-1", role)
            assert isinstance(worker._parts.engine.role, kind)
            assert len(list(worker._parts.engine.pool.snapshot())) >= num_cached > 0, "cached blocks stay"
            assert [await client.answer() for client in clients] == undisturbed
            clients = await ask_all(cluster)
            assert [await client.answer() for client in clients] == undisturbed
            chosen = [cluster.generate.decision(client.job.request_id)[0] for client in clients]
            assert any(candidate.prefill == "decode-1" for candidate in chosen) == (role is WorkerRole.PREFILL)
            assert any(candidate.decode == "decode-1" for candidate in chosen) == (role is WorkerRole.DECODE)
        assert cluster.generate.num_resumed == 0, "nothing was computed again"


async def test_a_reverted_flip_leaves_the_worker_unchanged(checkpoint: Path) -> None:
    """Without another decode worker the sequences stay until they end, which leaves time to revert."""
    async with cluster_of(checkpoint, "decode-0") as cluster:
        may_flip(cluster)
        clients = await ask_all(cluster)
        flipping = asyncio.create_task(flip(cluster, "decode-0", WorkerRole.PREFILL))
        while cluster.fleet.status()[0].state != "draining":
            await cluster.fleet.offers.wait(until=asyncio.get_running_loop().time() + 30)
        flipping.cancel()
        await WorkerCalls(open_channel).change_role(cluster.workers["decode-0"].info.address, WorkerRole.DECODE)
        assert cluster.workers["decode-0"].info.role is WorkerRole.DECODE
        later = await ask_all(cluster)
        for client in (*clients, *later):
            await client.answer()
        assert cluster.workers["decode-0"].info.role is WorkerRole.DECODE


async def test_a_colocated_worker_keeps_its_role(checkpoint: Path) -> None:
    async with cluster_of(checkpoint, "colocated-0") as cluster:
        address = cluster.workers["colocated-0"].info.address
        with pytest.raises(InvalidRequest, match="a colocated worker cannot become a decode worker"):
            await WorkerCalls(open_channel).change_role(address, WorkerRole.DECODE)
