"""The connection under a response."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop

from router.http.protocol import CorkedTransport, HttpProtocol, ResponseChannel
from tests.unit.router.scripted import Scripted, make_gateway, saying, serving


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tokens_leave_without_waiting_for_acknowledgements(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nagle's algorithm against a client's delayed acknowledgement costs 40 ms a token."""
    accepted: list[Any] = []
    made = HttpProtocol.connection_made

    def connection_made(protocol: HttpProtocol, transport: Any) -> None:
        accepted.append(transport)
        made(protocol, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)

    async def delays() -> list[int]:
        async with (
            serving(make_gateway(Scripted(saying("a b")))) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            await client.get("/v1/models")
            sockets = [connection.get_extra_info("socket") for connection in accepted]
            return [connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for connection in sockets]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(delays()) == [1]


def test_nothing_is_written_to_a_connection_that_closes() -> None:
    async def body() -> None:
        client, server = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=server)
        flow = SimpleNamespace(write_paused=False)
        cycle: Any = SimpleNamespace(
            transport=transport, flow=flow, disconnected=False, response_complete=False, chunked_encoding=True
        )
        corked = CorkedTransport(transport, asyncio.get_running_loop())
        channel = ResponseChannel(cycle, corked)
        assert channel.write(b"a", 1.0)
        assert channel.is_clear
        channel.flush()
        assert client.recv(99) == b"1\r\na\r\n"
        client.close()
        transport.close()
        assert not channel.write(b"b", 2.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
