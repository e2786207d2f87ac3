"""Addresses to listen at: IPv4, IPv6, and all of a machine's."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Any

import grpc
import pytest

from protos.listening import bound, host_of, netloc
from protos.tls import listen_grpc

BOTH = ("127.0.0.1", "::1")
IPV4, IPV6 = BOTH[:1], BOTH[1:]


def has_ipv6() -> bool:
    """False in many containers."""
    with suppress(OSError), bound("::1", 0):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
HOSTS = pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", IPV4), ("127.0.0.1", IPV4)]
    + [
        pytest.param(host, reached, marks=needs_ipv6)
        for host, reached in (("::", BOTH), ("::1", IPV6), ("[::1]", IPV6))
    ],
)


def reachable(port: int) -> tuple[str, ...]:
    addresses: list[str] = []
    for address in BOTH:
        with suppress(OSError), socket.create_connection((address, port)):
            addresses.append(address)
    return tuple(addresses)


@HOSTS
def test_a_socket_listens_where_it_was_told(host: str, reached: tuple[str, ...]) -> None:
    with bound(host, 0) as listening:
        listening.listen()
        assert reachable(listening.getsockname()[1]) == reached


@HOSTS
async def test_grpc_listens_where_it_was_told(host: str, reached: tuple[str, ...]) -> None:
    """0.0.0.0 was all of IPv6, too, and `::` no address."""
    server = grpc.aio.server()
    port = listen_grpc(server, host, 0, None)
    await server.start()
    try:
        assert reachable(port) == reached
    finally:
        await server.stop(0.0)


async def test_a_machine_without_ipv6_serves_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ipv6.disable=1` the kernel makes no such socket, and a gateway at 0.0.0.0 did not start."""
    make = socket.socket

    def make_ipv4(family: int = socket.AF_INET, *more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *more)

    server = grpc.aio.server()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", make_ipv4)
        assert listen_grpc(server, "0.0.0.0", 0, None) > 0
    await server.stop(0.0)


async def test_processes_that_share_a_port_of_ipv4_leave_ipv6_alone() -> None:
    first = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    second = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    port = listen_grpc(first, "0.0.0.0", 0, None)
    assert listen_grpc(second, "0.0.0.0", port, None) == port
    for server in (first, second):
        await server.start()
    assert reachable(port) == IPV4
    for server in (first, second):
        await server.stop(0.0)


def test_an_address_of_ipv6_has_brackets_beside_a_port() -> None:
    assert (netloc("::1", 80), netloc("h", 80)) == ("[::1]:80", "h:80")
    assert [host_of(netloc(host, 80)) for host in ("::1", "h")] == ["::1", "h"]
