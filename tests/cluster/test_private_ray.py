"""What a Ray of Baton's own shows to the network: nothing."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.deployed import Deployed

pytestmark = pytest.mark.cluster
LISTENS = "0A"  # proc(5), as the kernel's TCP_LISTEN


def test_no_socket_of_a_cluster_listens_beyond_this_machine(up: Deployed) -> None:
    """Ray's control store, raylet, object manager and workers listened on every address of the machine."""
    addresses = {where for pid in up.processes() for where in _listening(pid)}
    assert addresses, "the gateway and Ray listen somewhere"
    assert [str(where) for where in addresses if not where.is_loopback] == []


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
