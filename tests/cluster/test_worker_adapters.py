"""Adapters of a running worker over real gRPC: what its gateways see of orders to load and unload them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from protos import worker_pb2
from protos.errors import BadCheckpoint, NotFound
from protos.grpc_status import error_of
from protos.values import AdapterList, WorkerInfo, WorkerStats
from protos.wire import from_proto
from tests.cluster.toy_worker import BLOCK, VOCAB, WEIGHT, Gateway, parts_of
from tests.unit.workers.toy import ToyRunner
from workers.engine.served_adapters import ServedAdapters
from workers.rpc.worker import Worker

pytestmark = pytest.mark.cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    folder: Path
    adapter_id: str
    rank: int = 8
    num_bytes: int = 64


class FakeRanks:
    """Every folder is an adapter but those with `bad` in their names."""

    def __init__(self) -> None:
        self.loaded: dict[str, Loaded] = {}

    def check(self, path: str) -> Loaded:
        if "bad" in path:
            raise BadCheckpoint(f"{path} is no folder")
        return Loaded(folder=Path(path), adapter_id=f"id of {path}")

    def check_room(self, files: Any) -> None:
        pass

    def load_adapter(self, path: str, adapter_id: str) -> Loaded:
        self.loaded[adapter_id] = self.check(path)
        return self.loaded[adapter_id]

    def unload_adapter(self, adapter_id: str) -> None:
        del self.loaded[adapter_id]


async def test_gateways_see_loaded_adapters_and_unloading_frees_memory() -> None:
    parts, ranks = parts_of(ToyRunner(WEIGHT, BLOCK, VOCAB)), FakeRanks()
    parts.engine.adapters = ServedAdapters(cast(Any, ranks), "toy")
    worker = Worker(parts)
    await worker.start("127.0.0.1")
    gateway = Gateway(worker.info.address, "g")
    assert (await gateway.read()).adapters == AdapterList()
    request = worker_pb2.LoadAdapterRequest(name="sql", path="/sql")
    loaded = await gateway.stub.LoadAdapter(request)
    assert (loaded.adapter_id, loaded.rank) == ("id of /sql", 8)
    announced = (await gateway.read()).adapters
    assert announced is not None
    assert [adapter.name for adapter in announced.adapters] == ["sql"]
    described = from_proto(WorkerInfo, await gateway.stub.Describe(worker_pb2.DescribeRequest()))
    assert described.adapters == announced.adapters
    stats = from_proto(WorkerStats, await gateway.stub.Stats(worker_pb2.StatsRequest()))
    assert stats.info.adapters == announced.adapters
    with pytest.raises(grpc.RpcError) as refused:
        await gateway.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(name="other", path="/bad"))
    assert isinstance(error_of(refused.value), BadCheckpoint)
    await gateway.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="sql"))
    assert (await gateway.read()).adapters == AdapterList()
    assert not ranks.loaded
    with pytest.raises(grpc.RpcError) as missing:
        await gateway.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="sql"))
    assert isinstance(error_of(missing.value), NotFound)
    await gateway.close()
    await worker.stop()
