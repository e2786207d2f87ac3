"""`baton up` with a Ray that is absent or does not come up. Nothing here starts Ray."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from cluster.config.cluster_config import RayConfig
from cluster.process.scratch_dir import kill_users
from cluster.ray import ray_session
from cluster.ray.probe import check_answers
from cluster.ray.ray_session import Machines
from protos.errors import Misconfigured


@pytest.mark.parametrize("form", ["{}", "ray://{}", "auto"])
async def test_a_closed_port_is_reported_before_ray_tries_for_minutes(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        address = f"127.0.0.1:{somebody.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        await check_answers(form.format(address))
    with pytest.raises(Misconfigured, match=f"there is no Ray at .*{address}: .*refused.*; correct --ray-address"):
        await Machines(RayConfig(address=form.format(address)), tmp_path).start()


@pytest.mark.parametrize("num_failures", [1, 9])
async def test_a_client_for_which_ray_started_no_server_tries_again(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's client (2.60) raises this when the server that its port forked hangs."""
    trials = 0

    def init(**_: object) -> None:
        nonlocal trials
        trials += 1
        if trials <= num_failures:
            raise ConnectionError("Initialization failure from server:\nTraceback\nStarting Ray client server failed.")

    monkeypatch.setattr("ray.init", init)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        machines = Machines(RayConfig(address=f"ray://127.0.0.1:{somebody.getsockname()[1]}"), tmp_path)
        if num_failures == 1:
            await machines.start()
            assert trials == 2
        else:
            with pytest.raises(Misconfigured, match="Starting Ray client server failed"):
                await machines.start()
            assert trials == 3
        await machines.stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "host:many", "http://host:1"])
async def test_an_address_that_cannot_be_one_is_refused(address: str) -> None:
    with pytest.raises(Misconfigured, match=r"expected host:port, ray://host:port, or auto"):
        await check_answers(address)


async def test_a_start_that_never_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starting, never = threading.Event(), threading.Event()

    def start(self: Machines) -> None:
        starting.set()
        never.wait()

    monkeypatch.setattr(Machines, "_start", start)
    monkeypatch.setattr(Machines, "_stop", lambda self: None)
    monkeypatch.setattr(ray_session, "GIVE_UP_S", 0.01)
    ray = Machines(RayConfig(), tmp_path)
    start_up = asyncio.create_task(ray.start())
    await asyncio.to_thread(starting.wait)
    start_up.cancel()
    try:
        await ray.stop()
        await ray.stop()
    finally:
        never.set()


FOLDER = """
import asyncio, os
from pathlib import Path
import ray
from cluster.config.cluster_config import RayConfig
from cluster.ray.ray_session import Machines, short_folder
from cluster.process.scratch_dir import Scratch

def init(_temp_dir, **_):
    session = Path(_temp_dir) / "session_2026-11-23_01-49-16_799730_4194304"  # the largest pid_max of proc(5)
    around = session.parent.parent
    print(len(str(session / "sockets" / "plasma_store")), around.name[:6], oct(os.stat(around).st_mode))

async def main():
    machines = Machines(RayConfig(), Scratch(short_folder()).path)
    await machines.start()
    await machines.stop()

ray.init = init
asyncio.run(main())
"""


@pytest.mark.parametrize("num_chars", [26, 35])
def test_rays_folder_is_private_and_short_enough_for_sockets(num_chars: int) -> None:
    """Anybody on this machine could replace what lies there; and with a TMPDIR of 29 to 40 characters Ray did not
    start."""
    root = Path(__file__).parents[4]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="x" * (num_chars - 13)) as folder:
        assert len(folder) == num_chars
        command, environ = [sys.executable, "-c", FOLDER], os.environ | {"TMPDIR": folder}
        told = subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=100, text=True, env=environ)
    num_bytes, around, mode = told.stdout.split()
    assert int(num_bytes) <= 107
    assert (around, mode) == ("baton-", "0o40700")


CHILD = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_processes_that_use_a_folder_are_killed_and_no_others(tmp_path: Path) -> None:
    theirs, others = (str(tmp_path / name) for name in ("baton-a", "baton-b"))
    with (
        subprocess.Popen([sys.executable, "-c", PARENT, theirs], stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen([sys.executable, "-c", "input()", others], stdin=subprocess.PIPE) as spared,
    ):
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        kill_users(Path(theirs))
        assert not Path(f"/proc/{killed.pid}").exists()
        assert not Path(f"/proc/{child}").exists()
        assert spared.poll() is None
        spared.kill()
