"""A Ray of Baton's own: it shows nothing to the network, and its end is noticed also while it is being started."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.process.scratch_dir import programs
from tests.cluster.deployed import Deployed

pytestmark = pytest.mark.cluster
LISTENS = "0A"  # proc(5), as the kernel's TCP_LISTEN


def test_no_socket_of_a_cluster_listens_beyond_this_machine(up: Deployed) -> None:
    """Ray's control store, raylet, object manager and workers listened on every address of the machine."""
    addresses = {where for pid in up.processes() for where in _listening(pid)}
    assert addresses, "the gateway and Ray listen somewhere"
    assert [str(where) for where in addresses if not where.is_loopback] == []


START = """
import asyncio, os, pathlib, sys
from cluster.ray import ray_session as watching
from cluster.config.cluster_config import RayConfig
from cluster.ray.ray_session import Machines
from cluster.process.scratch_dir import programs
from protos.errors import Unavailable

def seen(folder, **options):
    found = [*programs(folder, **options)]
    if any(name == "gcs_server" for _, name in found):
        print("seen", flush=True)
    return found

watching.programs = seen

async def main():
    machines = Machines(RayConfig(), pathlib.Path(sys.argv[1]))
    try:
        await machines.start()
    except Unavailable as error:
        print(error)
    await machines.stop()
    os._exit(0)

asyncio.run(main())
"""


def _port_is_written(folder: Path) -> bool:
    """Ray first writes the port to a file with another name, which the pattern matches too."""
    with suppress(FileNotFoundError):  # it has been renamed
        return any(
            path.suffix == "" and path.read_text().isdigit() for path in folder.glob("r/session_*/gcs_server_port_*")
        )
    return False


def test_a_control_store_that_ends_at_the_start_is_not_awaited() -> None:
    """Ray's library waits for a minute."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="baton-") as folder:
        with subprocess.Popen([sys.executable, "-c", START, folder], stdout=subprocess.PIPE, text=True) as starting:
            while not _port_is_written(Path(folder)):  # Ray's library blocks Python until then
                assert starting.poll() is None
            [store] = [pid for pid, name in programs(Path(folder)) if name == "gcs_server"]
            os.kill(store, signal.SIGSTOP)  # so that Ray does not come up meanwhile
            assert starting.stdout is not None
            assert starting.stdout.readline() == "seen\n"
            os.kill(store, signal.SIGKILL)
            told = starting.stdout.read().replace("seen\n", "")
        assert told == "Ray's control store (GCS) has ended while Ray was being started\n"
        assert not [*programs(Path(folder))]


def _listening(pid: int) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses of the process's TCP sockets that listen, an IPv4 address in IPv6's form as IPv4."""
    inodes = set()
    with suppress(OSError):  # it has just ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENS and columns[9] in inodes:
                packed = bytes.fromhex(columns[1].partition(":")[0])
                words = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))  # in the host's order
                where = ipaddress.ip_address(socket.inet_ntop(family, words))
                yield getattr(where, "ipv4_mapped", None) or where
