"""When Ray is taken for lost, and when not. Nothing here starts a Ray."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cluster.config.cluster_config import RayConfig
from cluster.process.scratch_dir import programs
from cluster.ray import ray_session
from cluster.ray.ray_session import Machines

RESET = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER: on, for 0 s


async def test_a_connection_that_fails_is_no_answer_of_the_raylet() -> None:
    """gRPC ends a connection attempt after 20 s: a raylet that stood still was never given up with a larger
    `ray.response_timeout_s`. Here each attempt ends at once."""
    attempts = asyncio.Semaphore(0)

    async def reset(_: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()
        attempts.release()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as still:
        port = still.sockets[0].getsockname()[1]
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        asking = asyncio.create_task(ray_session._raylet_answers(node))
        for _ in range(2):
            attempt = asyncio.create_task(attempts.acquire())
            await asyncio.wait([asking, attempt], return_when=asyncio.FIRST_COMPLETED)
            assert not asking.done()
    raylet = grpc.aio.server()
    raylet.add_insecure_port(f"127.0.0.1:{port}")
    await raylet.start()
    await asking  # a refusal is an answer: this server has no health service
    await raylet.stop(None)


async def test_a_ray_without_an_answer_is_doubted_and_given_up(tmp_path: Path) -> None:
    machines, doubts = Machines(RayConfig(response_timeout_s=0.02), tmp_path), list[str]()
    never = asyncio.get_running_loop().create_future()
    assert await machines._unanswered(never, "raylet", doubts.append) == "Ray's raylet has not answered for 0.02 s"
    assert doubts == ["Ray's raylet does not answer"]
    assert not never.cancelled()


async def test_a_late_answer_ends_the_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "DOUBT_S", 0.01)
    machines, doubts = Machines(RayConfig(), tmp_path), list[str]()
    late = asyncio.get_running_loop().create_future()

    def doubt(reason: str) -> None:
        doubts.append(reason)
        if reason:
            late.set_result(None)

    assert await machines._unanswered(late, "raylet", doubt) == ""
    assert doubts == ["Ray's raylet does not answer", ""]


RAYLET = """
import os, sys

child = os.fork()
if not child:
    sys.stdin.readline()
    os._exit(0)
print("forked", flush=True)
os.waitpid(child, 0)
print("reaped", flush=True)
sys.stdin.read()
"""


def forking_raylet(folder: Path) -> subprocess.Popen[str]:
    command = ["raylet", "-c", RAYLET, str(folder)]
    return subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


async def test_a_child_of_a_raylet_may_end_while_ray_is_being_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks, raylet = threading.Semaphore(0), forking_raylet(tmp_path / ray_session.OURS)

    def look(folder: Path, *, parent: int | None = None) -> Iterator[tuple[int, str]]:
        looks.release()
        yield from programs(folder, parent=parent)

    def start(self: Machines) -> None:
        assert raylet.stdin is not None
        assert raylet.stdout is not None
        for step in ("forked\n", "reaped\n"):
            assert raylet.stdout.readline() == step
            while looks.acquire(blocking=False):
                pass
            looks.acquire()
            looks.acquire()  # the look before has ended
            raylet.stdin.write("\n")
            raylet.stdin.flush()

    monkeypatch.setattr(ray_session, "LOOK_S", 0.01)
    monkeypatch.setattr(ray_session, "programs", look)
    monkeypatch.setattr(Machines, "_start", start)
    monkeypatch.setattr(Machines, "_stop", lambda self: None)
    machines = Machines(RayConfig(), tmp_path)
    with raylet:
        try:
            await machines.start()
        finally:
            await machines.stop()  # kills it
