"""Connections, limits and orders between a supervisor and its gateway processes, without the processes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.config import ClusterConfig, SupervisionConfig
from cluster.config.settings import make_config
from cluster.gateway.connection_handoff import ConnectionHandoff, ConnectionReceiver
from cluster.gateway.messages import (
    CONTROL_MESSAGES,
    BeginProcess,
    EnterTenant,
    Message,
    Ping,
    ProcessFailed,
    ProcessStatuses,
    RequestEnded,
    TenantEntered,
    WorkerJoined,
    WorkerStarts,
)
from cluster.gateway.process import ToldDiscovery, is_news
from cluster.gateway.process_supervisor import GatewayProcesses
from cluster.gateway.tenant_limits import Keeper, KeptLimits
from cluster.process.channel import MessageChannel
from cluster.process.logs import LogFormat
from protos.errors import RateLimited
from protos.values import ErrorInfo, WorkerRole
from router.auth.tenants import Tenant
from router.config import RouterConfig
from router.fleet.fleet import STATE_LINE
from router.fleet.successors import Successor
from router.replicas.peers import ProcessStatus
from workers.config import WorkerConfig


class Process:
    """Takes connections, and keeps them until it is told to end one."""

    def __init__(self, door: ConnectionHandoff, number: int) -> None:
        self.taken: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.number = number
        self.threshold = ConnectionReceiver(door.open(number).dup(), self.taken.put_nowait)
        door.admit(number)

    def end_one(self) -> None:
        self.taken.get_nowait().close()
        self.threshold.ended()

    def close(self) -> None:
        self.threshold.close()
        while not self.taken.empty():
            self.taken.get_nowait().close()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def gateways(listening: socket.socket) -> GatewayProcesses:
    config = ClusterConfig(
        worker=WorkerConfig(model="m"),
        router=RouterConfig(model_path=Path(), model_name="toy", port=0, grpc_port=0),
        supervision=SupervisionConfig(initial_backoff_s=0.001, max_backoff_s=0.001),
    )
    return GatewayProcesses(config, listening, log_format=LogFormat.TEXT)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def connect(listening: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listening.getsockname()) for _ in range(count)]


async def until(process: Process, count: int) -> None:
    while process.taken.qsize() < count:  # noqa: ASYNC110 - it comes over a socket
        await asyncio.sleep(0)


async def test_each_connection_goes_to_whom_has_the_fewest(listening: socket.socket) -> None:
    door = ConnectionHandoff(listening)
    first, second = Process(door, 0), Process(door, 1)
    clients = connect(listening, 8)
    await until(first, 4)
    await until(second, 4)
    for _ in range(3):
        second.end_one()
    await turns()
    clients += connect(listening, 3)
    await until(second, 4)
    assert (first.taken.qsize(), second.taken.qsize()) == (4, 4)
    door.shut()
    for process in (first, second):
        await process.threshold.closed.wait()
        process.close()
        door.lose(process.number)
    for client in clients:
        client.close()


async def test_what_a_process_had_not_taken_goes_to_another(listening: socket.socket) -> None:
    door = ConnectionHandoff(listening)
    end = door.open(0)
    door.admit(0)  # it is given connections, and dies before it takes one
    [client] = connect(listening, 1)
    await turns()
    other = Process(door, 1)
    assert other.taken.empty()
    door.lose(0)
    assert end.fileno() == -1
    await until(other, 1)
    taken = await other.taken.get()
    taken.send(b"here")
    assert client.recv(4) == b"here"
    door.dismiss(1)
    await other.threshold.closed.wait()
    client.close()
    taken.close()
    other.close()
    door.lose(1)
    door.shut()


async def test_the_supervisor_sweeps_the_folder_of_one_that_was_killed_and_leaves_none(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "baton-killed").mkdir()
    (tmp_path / "baton-killed" / "owned").touch()
    made = gateways(listening)
    [mine] = os.listdir(tmp_path)
    assert os.listdir(tmp_path / mine) == ["owned"]
    assert mine != "baton-killed"
    for _ in range(2):
        await made.stop(0.0)
    assert not os.listdir(tmp_path)


async def test_what_a_process_had_not_taken_is_ended_once_the_door_is_shut(listening: socket.socket) -> None:
    door = ConnectionHandoff(listening)
    door.open(0)
    door.admit(0)
    [client] = connect(listening, 1)
    client.settimeout(5.0)
    await turns()
    door.shut()
    door.lose(0)
    assert client.recv(1) == b"", "it is told, and does not wait"
    client.close()


async def test_a_process_for_which_there_is_no_room_is_tried_again_and_costs_nothing(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors: list[int] = []
    often = asyncio.Event()

    async def no_room(*_: object, **__: object) -> None:
        descriptors.append(len(os.listdir("/proc/self/fd")))
        if len(descriptors) == 3:
            often.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    made = gateways(listening)
    starting, tried = asyncio.create_task(made.start()), asyncio.create_task(often.wait())
    await asyncio.wait([starting, tried], return_when=asyncio.FIRST_COMPLETED)
    assert often.is_set()
    assert not starting.done()
    assert len(set(descriptors)) == 1
    starting.cancel()
    await made.stop(0.0)


def test_of_what_all_processes_see_only_a_workers_state_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("baton.router")
    log.addFilter(is_news)
    try:
        with caplog.at_level(logging.INFO, logger=log.name):
            log.info(STATE_LINE, "w0", "here:1", "ready", "")
            log.warning(STATE_LINE, "w0", "here:1", "lost", ": it fell silent")
            log.info("request %s goes on elsewhere", "r0")
    finally:
        log.removeFilter(is_news)
    assert caplog.messages == ["worker w0 at here:1 is lost: it fell silent", "request r0 goes on elsewhere"]


async def test_processes_keep_a_tenants_limits_together() -> None:
    keeper, tenant = Keeper(lambda: 0.0), Tenant(name="acme", max_concurrent=2)
    ends = [socket.socketpair() for _ in range(2)]
    ours = [await MessageChannel.over(end, CONTROL_MESSAGES) for end, _ in ends]
    theirs = [await MessageChannel.over(end, CONTROL_MESSAGES) for _, end in ends]
    limits = [KeptLimits(control) for control in theirs]

    async def keep(process: int) -> None:
        while (message := await ours[process].receive()) is not None:
            if isinstance(message, EnterTenant):
                ours[process].send(await keeper.decide(process, message))
            elif isinstance(message, RequestEnded):
                keeper.gone(process, message)

    async def hear(process: int) -> None:
        while (message := await theirs[process].receive()) is not None:
            limits[process].answered(message)

    tasks = [asyncio.create_task(one(process)) for one in (keep, hear) for process in range(2)]
    await limits[0].enter(Tenant(name="free"), "r0", 1, 0.0)
    await limits[0].enter(tenant, "r1", 1, 0.0)
    await limits[1].enter(tenant, "r2", 1, 0.0)
    for process in range(2):
        with pytest.raises(RateLimited, match="2 requests running"):
            await limits[process].enter(tenant, "r3", 1, 0.0)
    limits[1].leave(tenant, "r2")
    await limits[1].enter(tenant, "r4", 1, 0.0)
    keeper.lost(1)  # what it had running is nobody's any more
    await limits[0].enter(tenant, "r5", 1, 0.0)
    with pytest.raises(RateLimited):
        await limits[0].enter(tenant, "r6", 1, 0.0)
    for control in (*ours, *theirs):
        await control.close()
    await asyncio.wait(tasks)


async def test_a_gateway_process_knows_what_the_supervisor_is_starting() -> None:
    heard: list[object] = []
    done = asyncio.Event()

    class Members:
        def set_degraded(self, reason: str) -> None:
            """Not looked at here."""

        def starting(self, worker_id: str, successor: Successor | None) -> None:
            heard.append((worker_id, successor))

        def add_worker(self, address: str, *, worker_id: str) -> None:
            heard.append((worker_id, address))
            done.set()

        async def remove_worker(self, worker_id: str) -> None:
            raise AssertionError(worker_id)

    loading, discovery = Successor(role=WorkerRole.DECODE, loaded=0.5), ToldDiscovery()
    discovery.hear(WorkerStarts(worker_id="decode-0", successor=loading))
    discovery.hear(WorkerJoined(worker_id="decode-0", address="h:1"))
    following = asyncio.create_task(discovery.follow(Members()))
    await done.wait()
    following.cancel()
    assert heard == [("decode-0", loading), ("decode-0", "h:1")]


async def test_all_that_a_supervisor_says_arrives_as_it_was_said(tmp_path: Path) -> None:
    config = make_config(
        {"model": str(tmp_path / "m"), "pools": {"prefill": 0}, "worker": {"num_blocks": 9}, "tls": {}, "processes": 3}
    )
    messages: tuple[Message, ...] = (
        BeginProcess(
            config=config, number=1, count=3, folder=tmp_path, log_format=LogFormat.JSON, is_told=True,
            addresses=("h:1", "h:2"),
        ),
        ProcessStatuses(statuses=(ProcessStatus(number=0, pid=5, state="ready"),), settled=True),
        WorkerStarts(worker_id="decode-0", successor=Successor(role=WorkerRole.DECODE, loaded=0.5)),
        WorkerStarts(worker_id="decode-0", successor=None),
        Ping(),
        EnterTenant(number=4, tenant=Tenant(name="acme", requests_per_min=0.5), request_id="r", num_tokens=7),
        TenantEntered(number=4, refusal=ErrorInfo(code="overloaded", message="later", retry_after_s=1.5)),
        ProcessFailed(error=ErrorInfo(code="misconfigured", message="no", param="port")),
    )  # fmt: skip
    ours, theirs = [await MessageChannel.over(end, CONTROL_MESSAGES) for end in socket.socketpair()]
    for message in messages:
        ours.send(message)
        assert await theirs.receive() == message
    await ours.close()
    assert await theirs.receive() is None
    await theirs.close()


PICKLE = pickle.dumps(Ping())


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!I", len(PICKLE)) + PICKLE,
        struct.pack("!I", 3) + b"\x01x\x90",
        struct.pack("!I", 2**32 - 1),
        b"\0\0\0\0",
    ],
    ids=["pickle", "unknown", "endless", "empty"],
)
async def test_a_channel_with_bytes_that_are_no_message_is_closed(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    end, stranger = socket.socketpair()
    control = await MessageChannel.over(end, CONTROL_MESSAGES)
    with stranger:
        stranger.sendall(sent)
        assert await control.receive() is None
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    assert "a channel between two of our processes is closed" in caplog.text
