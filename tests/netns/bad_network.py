"""Two hosts as far as the network can tell, and a link between them that a test may spoil: needs root, `ip` and TUN.

    namespace a: 10.77.0.1 on a TUN device ──▶ this process: delays, loses ──▶ TUN device, 10.77.0.2: namespace b

The packets pass through here, so nothing of the kernel's traffic control is needed, which not every kernel has.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

HOSTS = ("10.77.0.1", "10.77.0.2")
_TUN = Path("/dev/net/tun")
_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x1001  # IFF_TUN | IFF_NO_PI
_MTU = 1500


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "there is no iproute2 (`ip`)"
    if not _TUN.exists():
        return f"this kernel has no {_TUN}"
    probe = subprocess.run(["ip", "netns", "add", f"baton-probe-{os.getpid()}"], capture_output=True, check=False)
    if probe.returncode != 0:
        return f"no network namespaces here: {probe.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", f"baton-probe-{os.getpid()}"], check=True)
    return ""


class BadNetwork:
    """A good one until told otherwise. `delay_s` each way and `loss` (from 0 to 1) hold from the next packet on."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.cut = False
        self.num_lost = 0
        self.namespaces = tuple(f"baton-{side}-{os.getpid()}" for side in "ab")
        self._dice = random.Random(7)
        self._devices: list[int] = []
        for side, namespace in enumerate(self.namespaces):
            _ip("netns", "add", namespace)
            self._devices.append(self._add_device(namespace, HOSTS[side], HOSTS[1 - side]))
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="bad network", daemon=True)
        self._thread.start()

    def command(self, side: int, *command: str) -> list[str]:
        """The command, run on one of the two hosts."""
        return ["ip", "netns", "exec", self.namespaces[side], *command]

    def close(self) -> None:
        os.close(self._stop)
        self._thread.join()
        for device in (*self._devices, self._stopped):
            os.close(device)
        for namespace in self.namespaces:
            _ip("netns", "del", namespace)

    def _add_device(self, namespace: str, host: str, peer: str) -> int:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        name = f"tun{namespace[6]}{os.getpid()}"
        fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
        _ip("link", "set", name, "netns", namespace)
        _ip("-n", namespace, "address", "add", host, "peer", peer, "dev", name)
        _ip("-n", namespace, "link", "set", name, "mtu", str(_MTU), "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return device

    def _carry(self) -> None:
        late: deque[tuple[float, int, bytes]] = deque()  # in the order of arrival: the delay may change between packets
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            for device in self._devices:
                selector.register(device, selectors.EVENT_READ)
            while True:
                wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
                for key, _ in selector.select(wait_s):
                    if key.fd == self._stopped:
                        return
                    late.extend(self._read(key.fd))
                while late and late[0][0] <= time.monotonic():
                    _, device, packet = late.popleft()
                    os.write(device, packet)

    def _read(self, device: int) -> list[tuple[float, int, bytes]]:
        other = self._devices[1 - self._devices.index(device)]
        packets: list[tuple[float, int, bytes]] = []
        try:
            while len(packets) < 64:
                packet = os.read(device, 2 * _MTU)
                if self.cut or self._dice.random() < self.loss:
                    self.num_lost += 1
                else:
                    packets.append((time.monotonic() + self.delay_s, other, packet))
        except BlockingIOError:
            pass
        return packets


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
