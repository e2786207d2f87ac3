"""A client that opens a stream and never reads it is taken for gone: it does not hold a seat forever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from protos.errors import Cancelled
from router.http.protocol import HttpProtocol, ResponseChannel
from router.http.sse import EventStream

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Answer:
    """Says how it ended. By default it has more events than any socket's buffers hold; behind the last one a next one
    is waited for without end."""

    def __init__(self, *, num_bytes: int = 1_000_000, num_events: int = 1_000_000) -> None:
        self._event, self._num_events = b"data: " + b"x" * num_bytes + b"\n\n", num_events
        self.error: BaseException | None = None
        self.bugs: list[Exception] = []
        self.is_closed = False
        self.unread: list[bool] = []
        self.ended = asyncio.Event()
        self.told = asyncio.Event()

    async def events(self, channel: ResponseChannel | None) -> AsyncGenerator[bytes, None]:
        try:
            for _ in range(self._num_events):
                yield self._event
            await asyncio.Event().wait()
        finally:
            self.is_closed = True

    def set_unread(self, is_unread: bool) -> None:
        self.unread.append(is_unread)
        self.told.set()

    def finish(self, error: BaseException | None) -> None:
        self.error = error
        self.ended.set()


@asynccontextmanager
async def asking(answer: Answer, stall_s: float) -> AsyncIterator[tuple[socket.socket, ServerState]]:
    """A client with a sent request, and its server."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await EventStream(answer.events, cast("Any", answer), stall_s=stall_s)(scope, receive, send)
        except Exception as bug:
            answer.bugs.append(bug)

    config = uvicorn.Config(app, log_level="critical", lifespan="off", http=HttpProtocol)
    config.load()
    state, protocol = ServerState(), cast("Any", config.http_protocol_class)
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), host="127.0.0.1", port=0
    )
    with closing(server), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.sockets[0].getsockname())
        client.setblocking(False)
        client.sendall(REQUEST)
        async with asyncio.timeout(60):
            yield client, state


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("num_events", [1_000_000, 100], ids=["more than all buffers hold", "what the kernel takes"])
def test_a_client_that_takes_nothing_is_cut_and_its_answer_ends(num_events: int, new_loop: Any) -> None:
    answer = Answer(num_bytes=1000, num_events=num_events)

    async def talk() -> None:
        async with asking(answer, 0.2) as (_, state):
            await answer.ended.wait()
            assert answer.is_closed
            assert isinstance(answer.error, Cancelled)
            assert "has read nothing for 0.2 s" in answer.error.message
            assert not state.connections, "the connection has ended, too"
            assert not answer.bugs

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())


async def test_a_client_that_takes_little_is_not_cut() -> None:
    """It is always behind, but never long without taking anything."""
    answer = Answer(num_bytes=1000)
    loop = asyncio.get_running_loop()
    async with asking(answer, 1.0) as (client, _):
        begun_s = loop.time()
        while loop.time() < begun_s + 2.0:
            assert await loop.sock_recv(client, 2000)
            await asyncio.sleep(0.01)
        assert not answer.ended.is_set()
        client.close()
        await answer.ended.wait()


async def test_workers_learn_when_a_client_stops_and_resumes_reading() -> None:
    answer = Answer(num_bytes=1000)
    async with asking(answer, 1000.0) as (client, _):
        loop = asyncio.get_running_loop()
        for expected in (True, False):
            answer.told.clear()
            while not answer.told.is_set():
                if not expected:
                    await loop.sock_recv(client, 2**16)
                await asyncio.sleep(0)
            assert answer.unread[-1] is expected
        assert set(answer.unread[:-1]) == {True}
        assert not answer.ended.is_set()
        client.close()
        await answer.ended.wait()
