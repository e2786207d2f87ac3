"""Gateway processes and their parent, without the processes."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.config.cluster_config import ClusterConfig, SupervisionConfig
from cluster.config.settings import make_config
from cluster.gateway.replicas import Replicas
from cluster.process.logs import LogFormat
from protos.errors import Misconfigured
from router.prefix.registry import MEMORY
from router.router_config import RouterConfig
from workers.worker_config import WorkerConfig

REDIS = "redis://127.0.0.1:1"


def replicas(port: int = 0, grpc_port: int = 0, index: str = MEMORY) -> Replicas:
    config = ClusterConfig(
        worker=WorkerConfig(model="m"),
        router=RouterConfig(
            host="127.0.0.1",
            model_path=Path(),
            model_name="toy",
            port=port,
            grpc_port=grpc_port,
        ),
        supervision=SupervisionConfig(initial_backoff_s=0.001, max_backoff_s=0.001),
        processes=2,
        index=index,
    )
    return Replicas([config], addresses=("127.0.0.1:1",), log_format=LogFormat.TEXT)


async def test_a_process_without_room_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptors: list[int] = []
    often = asyncio.Event()

    async def no_room(*_: object, **__: object) -> None:
        descriptors.append(len(os.listdir("/proc/self/fd")))
        if len(descriptors) == 4:
            often.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    made = replicas(index=REDIS)
    starting, tried = asyncio.create_task(made.start()), asyncio.create_task(often.wait())
    await asyncio.wait([starting, tried], return_when=asyncio.FIRST_COMPLETED)
    assert often.is_set()
    assert not starting.done()
    assert len(set(descriptors)) == 1
    starting.cancel()
    await made.stop(0.0)


async def test_without_a_redis_server_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Misconfigured) as refused:
        replicas()
    assert refused.value.param == "processes"
    await replicas(index=REDIS).stop(0.0)  # that of another machine is enough


async def test_each_process_has_a_port_after_the_common_ones() -> None:
    for port in range(21_000, 22_000, 4):  # others may listen at some of these
        with suppress(Misconfigured):
            made = replicas(port=port, grpc_port=port + 1, index=REDIS)
            break
    assert made.ports == (port + 2, port + 3)
    with pytest.raises(Misconfigured) as refused:
        replicas(port=port + 2, grpc_port=port + 1, index=REDIS)
    assert refused.value.param == "port"
    await made.stop(0.0)


async def test_the_folder_of_the_sockets_goes_with_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = replicas()
    assert os.listdir(tmp_path)
    for _ in range(2):
        await made.stop(0.0)
    assert not os.listdir(tmp_path)


def test_the_settings_of_replicas_are_theirs_to_read(tmp_path: Path) -> None:
    from cluster.gateway.replicas import REPLICA_MESSAGES, BeginReplica

    config = make_config(
        {"model": str(tmp_path / "m"), "pools": {"prefill": 0}, "worker": {"num_blocks": 9}, "tls": {}, "processes": 3}
    )
    begin = BeginReplica(configs=(config,), addresses=("h:1",), ports=(1, 2), log_format=LogFormat.JSON)
    assert REPLICA_MESSAGES.decode(REPLICA_MESSAGES.encode("BeginReplica", begin)) == ("BeginReplica", begin)
