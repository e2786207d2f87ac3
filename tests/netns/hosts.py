"""Several hosts on one switch: network namespaces with addresses of their own. Needs root, `ip` and veth devices.

namespace 1: 10.x.y.1 ─┐
namespace 2: 10.x.y.2 ─┼─ bridge, 10.x.y.254: the test
...                   ─┘
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.netns import bad_network

_LISTENS = "0A"  # proc(5), as the kernel's TCP_LISTEN
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if reason := bad_network.why_not():
        return reason
    name = f"bv{os.getpid()}"
    probe = subprocess.run(
        ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        return f"no veth devices here: {probe.stderr.decode().strip()}"
    subprocess.run(["ip", "link", "del", name], check=True)
    return ""


class SwitchedHosts:
    """`count` hosts, from 1 on. Their network is this process's own: its numbers are made from the process id. Of the
    folder `shadowed` each host has one of its own."""

    def __init__(self, count: int, shadowed: Path | None = None) -> None:
        pid = os.getpid()
        self._shadowed = shadowed
        if shadowed is not None:
            for number in range(1, count + 1):
                Path(f"{shadowed}{number}").mkdir()
            shadowed.mkdir()
        self._net = f"10.{64 + pid % 64}.{pid // 64 % 256}"
        self._bridge = f"bb{pid}"
        self._names = [f"baton-host{number}-{pid}" for number in range(1, count + 1)]
        self._ends = [f"b{number}v{pid}" for number in range(1, count + 1)]
        # A bridge takes by itself the lowest address of its ports, so another one when a host is cut off.
        _ip("link", "add", self._bridge, "address", "02:00:00:00:00:fe", "type", "bridge")
        _ip("address", "add", f"{self._net}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for number, (name, end) in enumerate(zip(self._names, self._ends, strict=True), 1):
            _ip("netns", "add", name)
            _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", end, "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def address(self, number: int) -> str:
        return f"{self._net}.{number}"

    def command(self, number: int) -> Sequence[str]:
        """The words before a command that run it on a host."""
        inside = ("ip", "netns", "exec", self._names[number - 1])  # in a mount namespace of its own, too
        if self._shadowed is None:
            return inside
        return (*inside, "sh", "-c", f'mount --bind {self._shadowed}{number} {self._shadowed} && exec "$@"', "sh")

    def cut(self, number: int) -> None:
        """Nothing reaches the host any more, and nobody is notified."""
        _ip("link", "set", self._ends[number - 1], "nomaster")

    def mend(self, number: int) -> None:
        _ip("link", "set", self._ends[number - 1], "master", self._bridge)

    def pids(self, number: int) -> list[int]:
        """The processes on a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._names[number - 1]], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def listening(self, number: int) -> set[int]:
        """TCP ports on which a host can be reached from others."""
        net = Path(f"/proc/{self.pids(number)[0]}/net")
        lines = [line.split() for name in ("tcp", "tcp6") for line in (net / name).read_text().splitlines()[1:]]
        ends = (fields[1].split(":") for fields in lines if fields[3] == _LISTENS)
        return {int(port, 16) for address, port in ends if address not in _LOOPBACK}

    def lose(self, number: int, with_signal: int = signal.SIGKILL) -> None:
        """Every process on a host ends at once, or gets another signal."""
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, with_signal)

    def close(self) -> None:
        for number, name in enumerate(self._names, 1):
            self.lose(number)
            _ip("link", "del", self._ends[number - 1])  # else its name is taken until the kernel gets to it
            _ip("netns", "del", name)
        _ip("link", "del", self._bridge)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
