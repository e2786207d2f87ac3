"""A worker answers those who show the token of its run, and nobody else, whatever they ask."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from protos.errors import Misconfigured, Unauthenticated, WorkerLost
from protos.grpc_status import peer_error
from protos.tls import PeerTls
from router.fleet.channels import Channels
from router.fleet.worker_client import WorkerClient
from tests.cluster.deployed import Deployed
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.rpc.worker import Worker

pytestmark = pytest.mark.cluster

OURS = PeerTls().with_token()
METHODS = {
    "Describe": worker_pb2.DescribeRequest(),
    "Reserve": worker_pb2.ReserveRequest(),
    "Share": worker_pb2.ShareRequest(),
    "Abort": worker_pb2.AbortRequest(request_ids=["r"]),
    "Drain": worker_pb2.DrainRequest(exit=True),
    "Stats": worker_pb2.StatsRequest(),
    "Profile": worker_pb2.ProfileRequest(),
    "Health": worker_pb2.HealthRequest(),
}


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)))
    await worker.start("127.0.0.1", peers=OURS)
    yield worker
    await worker.stop()


def client(address: str, peers: PeerTls = OURS) -> WorkerClient:
    return WorkerClient(address, connect_timeout_s=5.0, control_timeout_s=5.0, open_channel=Channels(peers))


async def refusals(address: str, metadata: Any) -> dict[str, object]:
    """The worker's answer to every method. Nothing is sent on the stream, because grpc.aio raises INTERNAL for a
    message to a refused call."""
    answers: dict[str, object] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        asked: dict[str, Any] = {
            name: getattr(stub, name)(message, metadata=metadata, timeout=10.0) for name, message in METHODS.items()
        }
        asked["Stream"] = stub.Stream(metadata=metadata, timeout=10.0).read()
        for name, call in asked.items():
            try:
                answers[name] = await call
            except grpc.RpcError as error:
                answers[name] = (type(error).__name__, error.code(), type(peer_error(error)))
    return answers


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", "Bearer "),), (("authorization", f"Bearer {OURS.token}x"),), (("token", OURS.token),)],
    ids=["nothing", "an empty one", "another one", "elsewhere"],
)
async def test_calls_without_the_token_are_refused_without_effect(worker: Worker, metadata: Any) -> None:
    answers = await refusals(worker.info.address, metadata)
    refused = ("AioRpcError", grpc.StatusCode.UNAUTHENTICATED, Unauthenticated)
    assert answers == dict.fromkeys(answers, refused)
    assert len(answers) == len(METHODS) + 1
    ours = client(worker.info.address)
    assert not (await ours.stats()).load.draining, "a stranger's Drain had an effect"
    await ours.close()


async def test_calls_with_the_token_succeed_and_others_get_a_reason(worker: Worker) -> None:
    ours, stranger = client(worker.info.address), client(worker.info.address, PeerTls())
    assert (await ours.describe()).worker_id == "w"
    assert (await ours.health()).healthy
    with pytest.raises(WorkerLost, match=r"refuses this process: .*`baton gateway --token TOKEN`, or peers.token"):
        await stranger.describe()
    await ours.close()
    await stranger.close()


async def test_an_announced_token_is_valid_for_its_worker_only(worker: Worker) -> None:
    channels = Channels(PeerTls(token="of another supervisor".replace(" ", "-")))
    channels.learn(worker.info.address, OURS.token)
    member = WorkerClient(worker.info.address, connect_timeout_s=5.0, control_timeout_s=5.0, open_channel=channels)
    assert (await member.describe()).worker_id == "w"
    await member.close()
    channels.learn(worker.info.address, "")
    forgotten = WorkerClient(worker.info.address, connect_timeout_s=5.0, control_timeout_s=5.0, open_channel=channels)
    with pytest.raises(WorkerLost, match="refuses this process"):
        await forgotten.describe()
    await forgotten.close()


def test_a_run_has_a_token_of_its_own_that_is_not_shown() -> None:
    assert OURS.token != PeerTls().with_token().token
    assert len(OURS.token) >= 32
    assert OURS.with_token() == OURS
    assert OURS.token not in repr(OURS)


@pytest.mark.parametrize("token", ["short", "with spaces in it, and long", "ünïcode-and-long-enough"])
def test_a_token_that_would_be_none_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(Misconfigured, match=rf"peers.token has {len(token)} characters: give 16 or more") as caught:
        PeerTls(token=token)
    assert token not in caught.value.message


def test_the_workers_of_a_cluster_refuse_a_stranger(up: Deployed) -> None:
    ready = r"^worker (\S+) at (\S+) is ready"
    up.wait_for(ready, times=2)  # a cluster serves when one of them does
    addresses = dict(re.findall(ready, up.log, re.MULTILINE))  # each worker's last
    for address in addresses.values():
        answers = asyncio.run(refusals(address, ()))
        assert {str(answer) for answer in answers.values()} == {
            str(("AioRpcError", grpc.StatusCode.UNAUTHENTICATED, Unauthenticated))
        }
    assert up.text("import os", max_tokens=4)
