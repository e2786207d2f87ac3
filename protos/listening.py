"""Sockets that listen at an address of this machine: IPv4, IPv6, or with `::` both."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import ExitStack, suppress

ANY_IPV4 = "0.0.0.0"
HOLDING_S = 1.0


def netloc(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of a host:port, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def bound(host: str, port: int, *, option: int = socket.SO_REUSEADDR) -> socket.socket:
    """A socket that does not listen yet; port 0 takes a free one. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def hold_ipv6(port: int, held: ExitStack) -> int:
    """Takes the port in IPv6 until `held` closes: gRPC extends 0.0.0.0 to IPv6 unless the port is taken there. Waits
    for a process that shares the port and does the same. Returns the port, 0 without IPv6."""
    until_s = time.monotonic() + HOLDING_S
    with suppress(OSError):
        holder = held.enter_context(socket.socket(socket.AF_INET6))
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        while True:
            with bound(ANY_IPV4, 0) as free:  # in IPv4: a port that is only free in IPv6 is of no use
                number = port or int(free.getsockname()[1])
            try:
                holder.bind(("::", number))
                return number
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until_s:
                    raise
                time.sleep(0.01)
    return 0
